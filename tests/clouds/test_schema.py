"""Schema files: every field has a type and a source that the file names."""

import pytest
from graphql import GraphQLEnumType, GraphQLInputObjectType, GraphQLObjectType, build_schema

from tests.clouds.runpod_api import SDL
from tests.clouds.schema import Schema, check, field_of

SOURCES = {"sdk", "sky", "fetch", "docs", "spec", "client"}


@pytest.mark.parametrize("name", ["lambda", "vast"])
def test_every_field_names_a_source_of_the_file(name: str) -> None:
    schema = Schema(name)
    leaves = schema.leaves()
    assert len(leaves) > 50
    assert {source for _, field in leaves for source in field.sources} <= set(schema.sources)


def test_every_field_of_runpod_names_a_source() -> None:
    for kind in build_schema(SDL.read_text()).type_map.values():
        if isinstance(kind, GraphQLObjectType | GraphQLInputObjectType) and not kind.name.startswith("__"):
            for name, field in kind.fields.items():
                assert field.description in SOURCES, f"{kind.name}.{name}"
        elif isinstance(kind, GraphQLEnumType) and not kind.name.startswith("__"):
            assert all(value.description in SOURCES for value in kind.values.values()), kind.name


@pytest.mark.parametrize("text", ["string", "strong @docs", "string docs", "string! sky @docs"])
def test_a_field_without_type_or_source_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        field_of(text)


@pytest.mark.parametrize(
    ("schema", "value", "problem"),
    [
        ({"a": "int! @x"}, {}, "body lacks 'a'"),
        ({"a": "int @x"}, {"a": "1"}, "body.a is str, not int"),
        ({"a": "int @x"}, {"a": True}, "body.a is bool, not int"),
        ({"a": "int @x"}, {"a": None}, "body.a is null"),
        ({"a": "int @x"}, {"b": 1}, "body has no field 'b'"),
        ({"a": ["string @x"]}, {"a": ["s", 1]}, "body.a[1] is int, not string"),
        ({"a": ["string @x"]}, {"a": "s"}, "body.a is str, not a list"),
        ({"a": {"b": "int @x"}}, {"a": 1}, "body.a is int, not an object"),
        ({"a": {"_": "map! @x"}}, {}, "body lacks 'a'"),
        ({"*": "int @x"}, {"any": "s"}, "body.any is str, not int"),
    ],
)
def test_schema_violations_are_named(schema: object, value: object, problem: str) -> None:
    assert check(schema, value, "body") == [problem]


def test_conforming_values_pass() -> None:
    schema = {"a": "number @x", "b": "string|null @x", "c": {"_": "map|null @x"}, "d": [{"*": "any @x"}]}
    assert check(schema, {"a": 1, "b": None, "c": None, "d": [{"x": object()}]}, "body") == []

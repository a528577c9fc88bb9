"""RunPod's own description of its API against the emulator's: two GraphQL schemas, type by type."""

from collections.abc import Iterable, Iterator
from typing import Any

from graphql import (
    DocumentNode,
    FieldNode,
    GraphQLEnumType,
    GraphQLInputObjectType,
    GraphQLObjectType,
    GraphQLSchema,
    ObjectFieldNode,
    TypeInfo,
    TypeInfoVisitor,
    Visitor,
    get_named_type,
    is_leaf_type,
    is_required_input_field,
    visit,
)  # fmt: skip

from tests.live.shapes import DRIVERS, Difference

ROOTS_ARE_LARGE = frozenset({"Query", "Mutation"})
"""Root types, of which unknown calls are not reported."""
_SAME = {"ID": "String", "Void": "Boolean"}
SENT = DRIVERS | {"sdk"}
"""Sources of the calls that SkyPilot sends, some of them through RunPod's SDK."""


class _Used(Visitor):
    """Set of each queried `Type.field`, including arguments."""

    def __init__(self, info: TypeInfo) -> None:
        super().__init__()
        self._info = info
        self.fields: set[str] = set()

    def enter_field(self, node: FieldNode, *_: Any) -> None:
        if (parent := self._info.get_parent_type()) is not None:
            self.fields.add(f"{parent.name}.{node.name.value}")

    def enter_object_field(self, node: ObjectFieldNode, *_: Any) -> None:
        if (parent := self._info.get_parent_input_type()) is not None:
            self.fields.add(f"{get_named_type(parent).name}.{node.name.value}")


def used(documents: Iterable[DocumentNode], schema: GraphQLSchema) -> set[str]:
    """Return the fields and types that our own queries depend on."""
    found: set[str] = set()
    for document in documents:
        info = TypeInfo(schema)
        collector = _Used(info)
        visit(document, TypeInfoVisitor(info, collector))
        found |= collector.fields
    return found


def differences(ours: GraphQLSchema, theirs: GraphQLSchema, read: set[str]) -> list[Difference]:
    """Return the differences in the types that the emulator has; `read`: the result of `used`."""
    found: list[Difference] = []
    for name, kind in ours.type_map.items():
        if name.startswith("__"):
            continue
        other = theirs.type_map.get(name)
        if isinstance(kind, GraphQLObjectType | GraphQLInputObjectType):
            if isinstance(other, type(kind)):
                found += _fields(name, kind, other, read)
            else:
                needed = any(_needed(name, kind, field, read) for field in kind.fields)
                found.append(Difference(field=name, what="gone", needed=needed))
        elif isinstance(kind, GraphQLEnumType) and isinstance(other, GraphQLEnumType):
            found += _values(name, kind, other)
    return sorted(found, key=lambda one: (not one.needed, one.field))


def _needed(name: str, kind: Any, field: str, read: set[str]) -> bool:
    sources = SENT if isinstance(kind, GraphQLInputObjectType) or name == "Mutation" else DRIVERS
    return f"{name}.{field}" in read or kind.fields[field].description in sources


def _fields(name: str, ours: Any, theirs: Any, read: set[str]) -> Iterator[Difference]:
    given = isinstance(ours, GraphQLInputObjectType)
    for field, known in ours.fields.items():
        needed, at = _needed(name, ours, field, read), f"{name}.{field}"
        if field not in theirs.fields:
            yield Difference(field=at, what="gone", needed=needed)
        elif not _alike(known.type, theirs.fields[field].type):
            yield Difference(field=at, what=f"{theirs.fields[field].type}, was {known.type}", needed=needed)
    for field in theirs.fields.keys() - ours.fields.keys():
        new = theirs.fields[field]
        must = given and is_required_input_field(new)
        if must or name not in ROOTS_ARE_LARGE:
            what = f"new and required ({new.type})" if must else f"new ({new.type})"
            yield Difference(field=f"{name}.{field}", what=what, needed=must)


def _alike(ours: Any, theirs: Any) -> bool:
    """Return True if both types mean the same JSON. A difference in `!` alone is ignored: the field is read or sent
    anyway.
    """
    if is_leaf_type(get_named_type(ours)) != is_leaf_type(get_named_type(theirs)):
        return False
    mine, yours = str(ours).replace("!", ""), str(theirs).replace("!", "")
    return _plain(mine) == _plain(yours)


def _plain(name: str) -> str:
    bare = name.strip("[]")
    return name.replace(bare, _SAME.get(bare, bare))


def _values(name: str, ours: GraphQLEnumType, theirs: GraphQLEnumType) -> Iterator[Difference]:
    """Yield the values that are gone. New values are not reported, because our code reads them as `unknown`."""
    for value in ours.values.keys() - theirs.values.keys():
        yield Difference(field=f"{name}.{value}", what="gone", needed=False)
    for value in theirs.values.keys() - ours.values.keys():
        yield Difference(field=f"{name}.{value}", what="new", needed=False)

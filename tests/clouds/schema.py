"""Schema of an API's calls: every field with its type and its source.

A field is `<type>[!][|null] @source…` in the file; `!`: it is required. Types: string, int, number, bool, map (any
keys), any. A list has one element; an object is a mapping, where `_` describes itself and `*` any other key.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).with_name("schema")
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "int": (int,), "number": (int, float), "bool": (bool,), "map": (dict,), "any": (object,),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field as written in a schema file."""

    kind: str
    required: bool
    nullable: bool
    sources: tuple[str, ...]


def field_of(text: str) -> Field:
    """Read `string!|null @docs @sky`. Raises ValueError for an unknown type or a missing source."""
    kind, *rest = text.split()
    sources = tuple(word.removeprefix("@") for word in rest)
    name = kind.removesuffix("|null").removesuffix("!")
    if name not in _TYPES or not sources or not all(word.startswith("@") for word in rest):
        raise ValueError(f"{text!r} is not a `<type>[!][|null] @source…`")
    return Field(kind=name, required="!" in kind, nullable=kind.endswith("|null"), sources=sources)


def check(schema: Any, value: Any, where: str) -> list[str]:
    """Return the faults of a value, one line each."""
    if isinstance(schema, str):
        return _check_plain(field_of(schema), value, where)
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [f"{where} is {type(value).__name__}, not a list"]
        return [problem for i, item in enumerate(value) for problem in check(schema[0], item, f"{where}[{i}]")]
    about = field_of(schema["_"]) if "_" in schema else None
    if value is None and about is not None and about.nullable:
        return []
    if not isinstance(value, dict):
        return [f"{where} is {type(value).__name__}, not an object"]
    return _check_object(schema, value, where)


def _check_plain(field: Field, value: Any, where: str) -> list[str]:
    if value is None:
        return [] if field.nullable or field.kind == "any" else [f"{where} is null"]
    right = isinstance(value, _TYPES[field.kind])
    if isinstance(value, bool) and field.kind in {"int", "number"}:
        right = False
    return [] if right else [f"{where} is {type(value).__name__}, not {field.kind}"]


def _check_object(schema: Mapping[str, Any], value: Mapping[str, Any], where: str) -> list[str]:
    problems = []
    for name, item in value.items():
        if name in schema or "*" in schema:
            problems += check(schema.get(name, schema.get("*")), item, f"{where}.{name}")
        else:
            problems.append(f"{where} has no field {name!r}")
    missing = [n for n, s in schema.items() if n not in {"_", "*"} and _required(s) and n not in value]
    return problems + [f"{where} lacks {name!r}" for name in missing]


def _required(schema: Any) -> bool:
    if isinstance(schema, dict):
        schema = schema.get("_")
    return isinstance(schema, str) and field_of(schema).required


class Schema:
    """One API's schema file."""

    def __init__(self, name: str) -> None:
        document = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
        self.sources: Mapping[str, str] = document["sources"]
        self.calls: Mapping[str, Mapping[str, Any]] = document["calls"]
        self.fields: Mapping[str, Any] = document.get("fields", {})

    def asked(self, call: str, *, query: Mapping[str, Any], body: Any) -> list[str]:
        """Return the parts of a request that are not in the API's schema."""
        rules = self.calls[call]
        problems = check(rules.get("query", {}), dict(query), f"{call}: query")
        if "body" in rules:
            return problems + check(rules["body"], body, f"{call}: body")
        return problems + ([f"{call}: takes no body"] if body else [])

    def answered(self, call: str, answer: Any) -> list[str]:
        """Return the parts of an answer that differ from the API's schema: faults of the emulator."""
        return check(self.calls[call]["answer"], answer, f"{call}: answer")

    def leaves(self) -> Sequence[tuple[str, Field]]:
        """Return every described field with its path."""
        found: list[tuple[str, Field]] = []
        for name, rules in self.calls.items():
            for part in ("query", "body", "answer"):
                _leaves(rules.get(part, {}), f"{name}.{part}", found)
        _leaves(self.fields, "fields", found)
        return found


def _leaves(schema: Any, where: str, found: list[tuple[str, Field]]) -> None:
    if isinstance(schema, str):
        found.append((where, field_of(schema)))
    elif isinstance(schema, list):
        _leaves(schema[0], f"{where}[]", found)
    else:
        for name, inner in schema.items():
            _leaves(inner, f"{where}.{name}", found)

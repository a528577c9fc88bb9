"""Differences between a cloud's answers and its emulator's schema file: missing, mistyped, null or new fields."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from graphql import (
    DocumentNode,
    FieldNode,
    GraphQLEnumType,
    GraphQLList,
    GraphQLNonNull,
    GraphQLObjectType,
    GraphQLSchema,
    OperationDefinitionNode,
    SelectionSetNode,
)  # fmt: skip

from tests.clouds.schema import Field, field_of

DRIVERS = frozenset({"sky"})
"""Sources whose fields SkyPilot reads. Purchases depend on these fields, although our own code does not read them."""
_FITS: Mapping[str, Set[str]] = {
    "string": {"string"}, "int": {"int"}, "number": {"int", "number"}, "bool": {"bool"}, "map": {"object"},
    "any": {"string", "int", "number", "bool", "object", "list"}, "list": {"list"},
}  # fmt: skip
_SCALARS = {"String": "string", "ID": "string", "Int": "int", "Float": "number", "Boolean": "bool"}
MARKS = ("_", "*")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference of one field from the schema file."""

    field: str
    """`<call>.<path>`; `[]` is any element, `*` any key."""
    what: str
    needed: bool
    """True: our code or SkyPilot's depends on the field."""


@dataclass
class _Seen:
    schema: Any
    objects: int = 0
    present: int = 0
    nulls: int = 0
    odd: Counter[str] = field(default_factory=Counter)


class Shape:
    """All answers to one call, compared with its schema."""

    def __init__(
        self, call: str, schema: Any, *, lenient: bool = False, names: Mapping[str, str] | None = None
    ) -> None:
        """Prepare. `lenient`: every field may be null, unknown fields are ignored. `names`: field names by alias."""
        self.call, self.schema = call, schema
        self._lenient, self._names = lenient, names or {}
        self._fields: dict[str, _Seen] = {}
        self._new: dict[str, Counter[str]] = {}
        for path, part in self._paths(schema, call):
            self._fields[path] = _Seen(part)

    def path(self, parent: str, name: str) -> str:
        return f"{parent}.{self._names.get(name, name)}"

    def add(self, answer: Any) -> None:
        self._value(self.schema, answer, self.call)

    def differences(self, read: Set[str]) -> list[Difference]:
        """Return all differences. `read`: paths that the broker's code read."""
        found = [Difference(field=p, what=f"new ({_kinds(k)})", needed=False) for p, k in self._new.items()]
        for path, seen in self._fields.items():
            needed = path in read or bool(DRIVERS & _sources(seen.schema))
            found += [Difference(field=path, what=what, needed=needed) for what in self._wrong(seen)]
        return sorted(found, key=lambda one: (not one.needed, one.field))

    @property
    def paths(self) -> Set[str]:
        """Return the paths of all fields of the schema."""
        return self._fields.keys()

    @property
    def unseen(self) -> int:
        """Return the number of fields that cannot be judged, because no answer contained their parent."""
        return sum(1 for field in self._fields.values() if not field.objects)

    def _wrong(self, seen: _Seen) -> Iterator[str]:
        if seen.objects and not seen.present:
            yield "gone"
            return
        if _about(seen.schema, "required") and seen.present < seen.objects:
            yield f"missing in {seen.objects - seen.present} of {seen.objects}"
        if seen.nulls and not (self._lenient or _about(seen.schema, "nullable")):
            yield f"null in {seen.nulls} of {seen.present}"
        if seen.odd:
            yield f"{_kinds(seen.odd)}, was {_kind(seen.schema)}"

    def _value(self, schema: Any, value: Any, path: str) -> None:
        if isinstance(schema, list) and isinstance(value, list):
            for item in value:
                self._entered(f"{path}[]", schema[0], item)
        elif isinstance(schema, dict) and isinstance(value, dict):
            self._object(schema, value, path)

    def _object(self, schema: Mapping[str, Any], value: Mapping[str, Any], path: str) -> None:
        for name, part in schema.items():
            if name in MARKS:
                continue
            at = self.path(path, name)
            if name in value:
                self._entered(at, part, value[name])
            else:
                self._fields[at].objects += 1
        for name in value.keys() - schema.keys():
            if "*" in schema:
                self._entered(f"{path}.*", schema["*"], value[name])
            elif not self._lenient:
                self._new.setdefault(self.path(path, name), Counter())[_type(value[name])] += 1

    def _entered(self, path: str, schema: Any, item: Any) -> None:
        seen = self._fields[path]
        seen.objects += 1
        seen.present += 1
        if item is None:
            seen.nulls += 1
        elif _type(item) not in _FITS[_kind(schema)]:
            seen.odd[_type(item)] += 1
        else:
            self._value(schema, item, path)

    def _paths(self, schema: Any, path: str) -> Iterator[tuple[str, Any]]:
        """Yield every field below, in the order of the file; aliases of one field are one."""
        parts: Iterable[tuple[str, Any]] = ()
        if isinstance(schema, list):
            parts = [(f"{path}[]", schema[0])]
        elif isinstance(schema, dict):
            parts = [(self.path(path, name), part) for name, part in schema.items() if name != "_"]
        for at, part in parts:
            yield at, part
            yield from self._paths(part, at)


def _type(value: Any) -> str:
    """Return the JSON type of a value; values that botocore has parsed further (times) count as text."""
    for kind, types in (("bool", bool), ("int", int), ("number", float), ("list", list), ("object", dict)):
        if isinstance(value, types):
            return kind
    return "null" if value is None else "string"


def _kinds(seen: Mapping[str, int]) -> str:
    return " or ".join(sorted(seen))


def _kind(schema: Any) -> str:
    if isinstance(schema, str):
        return field_of(schema).kind
    return "list" if isinstance(schema, list) else "map"


def _own(schema: Any) -> Field | None:
    """Return the description of the value itself, not of its parts."""
    if isinstance(schema, dict):
        schema = schema.get("_")
    return field_of(schema) if isinstance(schema, str) else None


def _about(schema: Any, what: str) -> bool:
    own = _own(schema)
    return own is not None and (bool(getattr(own, what)) or (what == "nullable" and own.kind == "any"))


def _sources(schema: Any) -> Set[str]:
    """Return the sources of the value itself, or of all its parts."""
    if (own := _own(schema)) is not None:
        return set(own.sources)
    parts = schema if isinstance(schema, list) else list(schema.values())
    return {source for part in parts for source in _sources(part)}


# ------------------------------------------------------------------------------------------------------------ GraphQL


def of_query(document: DocumentNode, schema: GraphQLSchema) -> tuple[Any, Mapping[str, str]]:
    """Return the shape of an answer to a query, as a schema file would have it, and the names behind its aliases."""
    (operation,) = (d for d in document.definitions if isinstance(d, OperationDefinitionNode))
    assert schema.query_type is not None
    names: dict[str, str] = {}
    return {"data": _selected(schema.query_type, operation.selection_set, "map|null @spec", names)}, names


def _selected(kind: Any, selection: SelectionSetNode | None, about: str, names: dict[str, str]) -> Any:
    if isinstance(kind, GraphQLNonNull):
        return _selected(kind.of_type, selection, about, names)
    if isinstance(kind, GraphQLList):
        return [_selected(kind.of_type, selection, about, names)]
    if not isinstance(kind, GraphQLObjectType) or selection is None:
        scalar = "string" if isinstance(kind, GraphQLEnumType) else _SCALARS.get(kind.name, "any")
        return f"{scalar}|null {about.partition(' ')[2]}"
    shape: dict[str, Any] = {"_": about}
    for node in selection.selections:
        assert isinstance(node, FieldNode), "our queries have no fragments"
        known = kind.fields[node.name.value]
        alias = node.alias.value if node.alias else node.name.value
        names[alias] = node.name.value
        shape[alias] = _selected(known.type, node.selection_set, f"map|null @{known.description}", names)
    return shape

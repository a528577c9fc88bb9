"""Vast's search: filters by field and operator, order, and the cap on answers."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

NOT_FIELDS = frozenset({"type", "order", "limit", "allocated_storage", "disable_bundling"})
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "eq": lambda has, wants: bool(has == wants),
    "neq": lambda has, wants: bool(has != wants),
    "gt": lambda has, wants: bool(has > wants),
    "gte": lambda has, wants: bool(has >= wants),
    "lt": lambda has, wants: bool(has < wants),
    "lte": lambda has, wants: bool(has <= wants),
    "in": lambda has, wants: has in wants,
    "notin": lambda has, wants: has not in wants,
}


def matching(rows: Iterable[dict[str, Any]], query: Mapping[str, Any], *, cap: int | None) -> list[dict[str, Any]]:
    """Return the rows that a search finds, ordered, `limit` or `cap` of them at most."""
    found = [row for row in rows if _fits(row, query)]
    for name, direction in reversed(query.get("order") or [["score", "desc"]]):
        found.sort(key=lambda row: (row.get(name) is None, row.get(name)), reverse=direction == "desc")
    limits = [n for n in (query.get("limit"), cap) if n is not None]
    return found[: min(limits)] if limits else found


def _fits(row: Mapping[str, Any], query: Mapping[str, Any]) -> bool:
    return all(
        _COMPARE[operator](has, _like(has, wants))
        for name, conditions in query.items()
        if name not in NOT_FIELDS
        for operator, wants in conditions.items()
        for has in [_value(row, name)]
        if wants is not None
    )


def _value(row: Mapping[str, Any], name: str) -> Any:
    """Return the value that a filter compares; some names are not columns."""
    match name:
        case "verified":
            return row["verification"] == "verified"
        case "datacenter":
            return row["hosting_type"] == 1
        case "external":
            return bool(row["external"])
        case "geolocation":
            return (row["geolocation"] or "")[-2:]
    return row.get(name)


def _like(has: Any, wants: Any) -> Any:
    """Return the value with the type of the offer's field, because the SDK sometimes sends numbers as strings."""
    if isinstance(has, int | float) and not isinstance(has, bool) and isinstance(wants, str):
        return float(wants)
    return wants

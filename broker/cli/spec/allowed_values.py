"""Allowed values of a setting in words, for the reference page and for the comments of `gpubroker init`."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel

from broker.cli.spec import schema
from broker.domain.spec import JobSpec

BOUNDS = (("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", "to"), ("exclusiveMaximum", "below"))
KINDS = {"integer": "whole number", "number": "number", "string": "text"}


def allowed_values(path: schema.Path, root: type[BaseModel] = JobSpec) -> str:
    """Return the values of the setting at `path`, of all kinds that have it; empty for a group of settings."""
    words: dict[str, None] = {}
    for model in schema.models(path[:-1], root):
        top = _schema(model)
        if (own := top.get("properties", {}).get(path[-1])) is not None:
            words.update(dict.fromkeys(_alternatives(own, top)))
    return ", ".join(word for word in words if word)


@cache
def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


def _alternatives(own: Mapping[str, Any], top: Mapping[str, Any]) -> Iterator[str]:
    """Yield the values in words. The text form of a number is left out, unless it has examples, as a duration has."""
    if "$ref" in own:
        own = top["$defs"][own["$ref"].rsplit("/", 1)[-1]]
    options = [*own.get("anyOf", ()), *own.get("oneOf", ())]
    has_number = any(option.get("type") in ("integer", "number") for option in options)
    for option in options:
        is_text_of_number = has_number and option.get("type") == "string" and "const" not in option
        if is_text_of_number and "examples" in option:
            yield from (f"`{example}`" for example in option["examples"])
        elif not is_text_of_number:
            yield from _alternatives(option, top)
    if "enum" in own or "const" in own:
        yield from (f"`{_plain(value)}`" for value in own.get("enum", [own.get("const")]))
    elif not options:
        yield _kind(own, top)


def _kind(own: Mapping[str, Any], top: Mapping[str, Any]) -> str:
    match own.get("type"):
        case "boolean":
            return "`true`, `false`"
        case "array":
            items = ", ".join(_alternatives(own.get("items", {}), top))
            return f"list of {items}" if items.startswith("`") else f"list of {items}s" if items else "list"
        case "object":
            return "" if "properties" in own else "mapping"
        case "string" if own.get("format") == "date-time":
            return "time"
        case "integer" | "number" | "string" as kind:
            return " ".join([KINDS[kind], *(f"{word} {_digits(own[name])}" for name, word in BOUNDS if name in own)])
    return ""


def _digits(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

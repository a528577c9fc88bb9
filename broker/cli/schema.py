"""The settings of a spec by path, read off the models that check it: what there is, and what a wrong word meant."""

import difflib
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from broker.domain.spec import JobSpec

Path = tuple[str, ...]


def kinds(path: Path) -> tuple[Any, ...]:
    """The classes that a value at `path` can have; empty for an unknown path."""
    found: tuple[Any, ...] = (JobSpec,)
    for key in path:
        found = tuple(
            kind
            for model in found
            if _is_model(model) and key in model.model_fields
            for kind in _classes(model.model_fields[key].annotation)
        )
    return found


def models(path: Path) -> tuple[type[BaseModel], ...]:
    """The groups of settings that can stand at `path`."""
    return tuple(kind for kind in kinds(path) if _is_model(kind))


def fields(path: Path) -> dict[str, FieldInfo]:
    """The settings below `path`, by name; where kinds share a name, the first kind's (the default)."""
    found: dict[str, FieldInfo] = {}
    for model in models(path):
        for name, field in model.model_fields.items():
            found.setdefault(name, field)
    return found


def paths(above: Path = ()) -> Iterator[Path]:
    """Every setting of a spec, groups before their members."""
    for name in fields(above):
        yield (*above, name)
        yield from paths((*above, name))


def nearest(word: str, above: Path) -> str:
    """What `word` below `above` was meant to be: a sibling, else a setting elsewhere, else what there is."""
    siblings = sorted(fields(above))
    if word in siblings:
        return "it belongs to another `kind`"
    if match := difflib.get_close_matches(word, siblings, n=1, cutoff=0.6):
        return f"did you mean {match[0]!r}?"
    elsewhere = {path[-1]: ".".join(path) for path in paths()}
    if match := difflib.get_close_matches(word, elsewhere, n=1, cutoff=0.75):
        return f"did you mean {elsewhere[match[0]]!r}?"
    return f"there are {', '.join(siblings)}"


def _is_model(kind: Any) -> typing.TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _classes(annotation: Any) -> tuple[Any, ...]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _classes(get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return tuple(kind for part in get_args(annotation) for kind in _classes(part))
    return (origin or annotation,)

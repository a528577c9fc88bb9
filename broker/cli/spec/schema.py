"""Settings by path, read off the models that check them: what there is, and what a wrong word meant.

Those of a job's spec where no other model is named.
"""

import difflib
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from broker.domain.spec import JobSpec

Path = tuple[str, ...]


def kinds(path: Path, root: type[BaseModel] = JobSpec) -> tuple[Any, ...]:
    """The classes that a value at `path` can have; empty for an unknown path."""
    found: tuple[Any, ...] = (root,)
    for key in path:
        found = tuple(
            kind
            for model in found
            if _is_model(model) and key in _named(model)
            for kind in _classes(_named(model)[key].annotation)
        )
    return found


def models(path: Path, root: type[BaseModel] = JobSpec) -> tuple[type[BaseModel], ...]:
    """The groups of settings that can stand at `path`."""
    return tuple(kind for kind in kinds(path, root) if _is_model(kind))


def fields(path: Path, root: type[BaseModel] = JobSpec) -> dict[str, FieldInfo]:
    """The settings below `path`, by name; where kinds share a name, the first kind's (the default)."""
    found: dict[str, FieldInfo] = {}
    for model in models(path, root):
        for name, field in _named(model).items():
            found.setdefault(name, field)
    return found


def paths(above: Path = (), root: type[BaseModel] = JobSpec) -> Iterator[Path]:
    """Every setting, groups before their members."""
    for name in fields(above, root):
        yield (*above, name)
        yield from paths((*above, name), root)


def _named(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Fields as people write them."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


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

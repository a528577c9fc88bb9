"""Settings by path, read from the pydantic models: lists of settings, and suggestions for unknown names.

The functions use the model of the job's spec unless another `root` is given.
"""

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from broker.domain.spec import JobSpec
from trainer.contract.base import descriptions
from trainer.contract.suggestions import close_matches

Path = tuple[str, ...]


def kinds(path: Path, root: type[BaseModel] = JobSpec) -> tuple[Any, ...]:
    """Return the classes that a value at `path` can have; empty for an unknown path."""
    classes: tuple[Any, ...] = (root,)
    for key in path:
        classes = tuple(
            kind
            for model in classes
            if _is_model(model) and key in _named(model)
            for kind in _classes(_named(model)[key].annotation)
        )
    return classes


def models(path: Path, root: type[BaseModel] = JobSpec) -> tuple[type[BaseModel], ...]:
    """Return the groups of settings that can occur at `path`."""
    return tuple(kind for kind in kinds(path, root) if _is_model(kind))


def fields(path: Path, root: type[BaseModel] = JobSpec) -> dict[str, FieldInfo]:
    """Return the settings below `path` by name. If kinds share a name, the first kind (the default) wins."""
    by_name: dict[str, FieldInfo] = {}
    for model in models(path, root):
        for name, field in _named(model).items():
            by_name.setdefault(name, field)
    return by_name


def paths(above: Path = (), root: type[BaseModel] = JobSpec) -> Iterator[Path]:
    """Yield the path of every setting, groups before their members."""
    for name in fields(above, root):
        yield (*above, name)
        yield from paths((*above, name), root)


def _named(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields by the names used in a file."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def description(path: Path, root: type[BaseModel] = JobSpec) -> str:
    """Return the description of the setting at `path`; empty if it has none."""
    for model in models(path[:-1], root):
        names = {field.alias or name: name for name, field in model.model_fields.items()}
        if path[-1] in names:
            return descriptions(model).get(names[path[-1]], "")
    return ""


def nearest(word: str, above: Path) -> str:
    """Return a hint for the unknown name `word` below `above`.

    The hint names a similar sibling, otherwise a similar setting in another group, otherwise all siblings.
    """
    siblings = sorted(fields(above))
    if word in siblings:
        return "it belongs to another `kind`"
    if match := close_matches(word, siblings, n=1, cutoff=0.6):
        return f"did you mean {match[0]!r}?"
    elsewhere = {path[-1]: ".".join(path) for path in paths()}
    if match := close_matches(word, elsewhere, n=1, cutoff=0.75):
        return f"did you mean {elsewhere[match[0]]!r}?"
    return f"use one of {', '.join(siblings)}"


def _is_model(kind: Any) -> typing.TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _classes(annotation: Any) -> tuple[Any, ...]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _classes(get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return tuple(kind for part in get_args(annotation) for kind in _classes(part))
    return (origin or annotation,)

"""Short forms in a spec, for the command line and the Python client; the API takes only the full form.

| written | meaning |
|---|---|
| `accelerators: H100` | `[H100]`, in every list of texts |
| `command: python3 train.py --lr 0.1` | `[python3, train.py, --lr, "0.1"]`; a line for a shell is refused |
| `env: {EPOCHS: 3, DEBUG: true}` | `{EPOCHS: "3", DEBUG: "true"}`, also in `labels` |
| `prompt: {question}` | `"{question}"`, which YAML reads as a mapping |
"""

import json
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel

from broker.domain.spec import JobSpec
from trainer.contract.script import line_words

Path = tuple[str, ...]
SCALARS = (str, int, float, bool)
COMMAND: Path = ("script", "command")


def full_form(spec: Mapping[str, Any], texts: Mapping[Path, str] | None = None) -> dict[str, Any]:
    """Return a copy of a spec in which short forms are replaced. Other faults are left to the validation.

    `texts`: numbers and booleans as a file or an option wrote them, by path, so that 1.10 does not become 1.1.
    """
    return {
        key: _value(value, tuple(_at((JobSpec,), str(key))), (str(key),), texts or {}) for key, value in spec.items()
    }


def _value(value: Any, kinds: tuple[Any, ...], path: Path, texts: Mapping[Path, str]) -> Any:
    """Return a value in the full form of the first of its kinds that has one."""
    origins = [get_origin(kind) or kind for kind in kinds]
    if isinstance(value, Mapping):
        if dict in origins:
            return {key: _text(item, (*path, str(key)), texts) for key, item in value.items()}
        if models := tuple(kind for kind in kinds if _is_model(kind)):
            return {
                key: _value(item, tuple(_at(models, str(key))), (*path, str(key)), texts) for key, item in value.items()
            }
        return _template(value) if str in origins else value
    if path == COMMAND:
        return _command(value, texts)
    if isinstance(value, SCALARS) and tuple in origins and not any(_accepts(kind, value) for kind in kinds):
        return [value]
    return value


def _at(models: tuple[Any, ...], key: str) -> Iterator[Any]:
    """Yield the kinds of a setting, in any of the models that can occur there."""
    for model in models:
        for name, field in model.model_fields.items():
            if (field.alias or name) == key:
                yield from _kinds(field.annotation)


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield the alternatives of an annotation."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif origin in (typing.Union, types.UnionType):
        for part in get_args(annotation):
            yield from _kinds(part)
    else:
        yield annotation


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _accepts(kind: Any, value: Any) -> bool:
    """Return True for a kind of scalar that takes the value."""
    return value in get_args(kind) if get_origin(kind) is Literal else kind is type(value)


def _text(value: Any, path: Path, texts: Mapping[Path, str]) -> Any:
    """Return a number or a boolean as text, as it was written."""
    if isinstance(value, str) or not isinstance(value, SCALARS):
        return value
    return texts.get(path) or json.dumps(value)


def _template(value: Mapping[Any, Any]) -> Any:
    """Return `{question}` for the mapping that YAML makes of it."""
    ((key, item),) = value.items() if len(value) == 1 else (("", value),)
    return f"{{{key}}}" if isinstance(key, str) and key and item is None else value


def _command(value: Any, texts: Mapping[Path, str]) -> Any:
    """Return the words of a command line; a line that needs a shell is returned unchanged, and the model refuses it."""
    if isinstance(value, list | tuple):
        return [_text(item, (*COMMAND, str(number)), texts) for number, item in enumerate(value)]
    words = line_words(value) if isinstance(value, str) else None
    return value if words is None else words

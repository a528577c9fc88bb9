"""`--set train.epochs=2`: changes a spec from the command line. Values are parsed as YAML and checked by the schema."""

import copy
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from broker.cli.core.exit_codes import BadInput
from broker.cli.spec import schema
from broker.client.spec_shorthand import full_form
from trainer.contract.yaml_document import parse_value


def apply(
    data: dict[str, Any], settings: tuple[str, ...], texts: Mapping[schema.Path, str]
) -> tuple[dict[str, Any], dict[schema.Path, str]]:
    """Return (a copy of `data` in its full form with each `path=value` set, the option that set each value, by path).

    `texts`: numbers and booleans of `data` as the file wrote them.

    Raises BadInput for a path that the spec does not have.
    """
    changed: dict[str, Any] = copy.deepcopy(data)
    sources: dict[schema.Path, str] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not path.strip():
            raise BadInput(f"--set {setting}: write PATH=VALUE, for example --set train.epochs=2")
        keys = tuple(path.strip().split("."))
        _check(keys)
        _set(changed, keys, _value(keys, text))
        texts = {path: written for path, written in texts.items() if path[: len(keys)] != keys}
        texts[keys], sources[keys] = text.strip(), f"--set {'.'.join(keys)}"
    return full_form(changed, texts), sources


def _value(keys: tuple[str, ...], text: str) -> Any:
    """Return the value of a setting. Where only text is allowed, other YAML such as `{word}` or 3 is read as text."""
    value = parse_value(text)
    return text if not isinstance(value, str) and schema.kinds(keys) == (str,) else value


def _check(keys: tuple[str, ...]) -> None:
    for depth in range(len(keys)):
        above, key = keys[:depth], keys[depth]
        if dict in schema.kinds(above):
            return
        if not schema.models(above):
            raise BadInput(f"--set {'.'.join(keys)}: {'.'.join(above)} is a value, not a group of settings")
        if key not in schema.fields(above):
            raise BadInput(f"--set {'.'.join(keys)}: no such setting; {schema.nearest(key, above)}")


def _set(data: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    for depth, key in enumerate(keys[:-1]):
        inner = data.get(key)
        if not isinstance(inner, dict):
            inner = data[key] = _default(keys[: depth + 1])
        data = inner
    data[keys[-1]] = value


def _default(path: tuple[str, ...]) -> dict[str, Any]:
    """Return the initial group for a path that the file lacks: its default kind.

    For example, `--set train.method.r=8` changes the default method.
    """
    default = schema.fields(path[:-1])[path[-1]].default if path[-1] in schema.fields(path[:-1]) else None
    return default.model_dump(mode="json", include={"kind"}) if isinstance(default, BaseModel) else {}

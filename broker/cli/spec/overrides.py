"""`--set train.epochs=2`: changes a spec from the command line. Values are parsed as YAML and checked by the schema."""

import copy
from typing import Any

from pydantic import BaseModel

from broker.cli.core.exit_codes import BadInput
from broker.cli.spec import schema
from trainer.contract.yaml_document import parse_value


def apply(data: dict[str, Any], settings: tuple[str, ...]) -> tuple[dict[str, Any], dict[schema.Path, str]]:
    """Return (a copy of `data` with each `path=value` set, the option that set each value, by path).

    Raises BadInput for a path that the spec does not have.
    """
    changed: dict[str, Any] = copy.deepcopy(data)
    given: dict[schema.Path, str] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not path.strip():
            raise BadInput(f"--set {setting}: write PATH=VALUE, for example --set train.epochs=2")
        keys = tuple(path.strip().split("."))
        _check(keys)
        _set(changed, keys, parse_value(text))
        given[keys] = f"--set {'.'.join(keys)}"
    return changed, given


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

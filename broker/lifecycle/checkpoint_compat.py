"""Checks whether a job can resume from another job's checkpoint: weights and optimizer states must fit its model."""

from collections.abc import Iterator, Mapping
from typing import Any

from broker.domain.spec import JobSpec

UNSHAPED = frozenset({"alpha", "dropout", "rslora"})
"""Method settings that shape no tensor."""


def incompatibility(origin: JobSpec, spec: JobSpec) -> tuple[str, str] | None:
    """Return (field, fault) of the job `spec`, which is to start from a checkpoint of `origin`; None: it fits."""
    if (origin.train is None) != (spec.train is None):
        kinds = ("script", "train") if origin.train is None else ("train", "script")
        return "init_from", f"that job is a {kinds[0]} and this one is a {kinds[1]}; leave it out"
    if origin.train is None or spec.train is None:
        return None
    old_settings, new_settings = (_shaping_settings(spec) for spec in (origin, spec))
    for field, value in new_settings.items():
        if field in old_settings and old_settings[field] != value:
            difference = f"{value}, but the job of init_from was trained with {old_settings[field]}"
            return field, f"{difference}; set it so, or leave init_from out"
    return None


def _shaping_settings(spec: JobSpec) -> Mapping[str, Any]:
    """Return the settings that determine weights and states, the most informative first."""
    assert spec.train is not None
    train = spec.train
    method = train.method.model_dump(mode="json")
    method = {"kind": method["kind"], **method}
    named: dict[str, Any] = {"task": train.task, "method": method, "optim": {"name": train.optim.name}}
    if method["kind"] != "full":  # a full checkpoint holds all weights, so the name of its base does not matter
        named = {"model": train.model, "revision": train.revision or "main", **named}
    return dict(_fields(named, "train"))


def _fields(values: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _fields(value, f"{place}.{name}")
        elif name not in UNSHAPED:
            yield f"{place}.{name}", value

"""Whether a job can go on from another one's checkpoint: its weights and optimizer states must have a place in it."""

from collections.abc import Iterator, Mapping
from typing import Any

from broker.domain.spec import JobSpec

FREE = frozenset({"alpha", "dropout", "rslora"})
"""Of a method: they shape no tensor."""


def incompatibility(was: JobSpec, now: JobSpec) -> tuple[str, str] | None:
    """(field, what is wrong with it) of a job that is to start from a checkpoint of `was`; None: it fits."""
    if (was.train is None) != (now.train is None):
        kinds = ("script", "train") if was.train is None else ("train", "script")
        return "init_from", f"that job is a {kinds[0]} and this one is a {kinds[1]}; leave it out"
    if was.train is None or now.train is None:
        return None
    old, new = (_shaping(spec) for spec in (was, now))
    for field, value in new.items():
        if field in old and old[field] != value:
            told = f"{value}, and what init_from names was trained with {old[field]}"
            return field, f"{told}; set it so, or leave init_from out"
    return None


def _shaping(spec: JobSpec) -> Mapping[str, Any]:
    """The settings that weights and states follow from, those that tell most first."""
    assert spec.train is not None
    train = spec.train
    method = train.method.model_dump(mode="json")
    method = {"kind": method["kind"], **method}
    named: dict[str, Any] = {"task": train.task, "method": method, "optim": {"name": train.optim.name}}
    if method["kind"] != "full":  # else all weights are in the checkpoint, whatever its base was called
        named = {"model": train.model, "revision": train.revision or "main", **named}
    return dict(_fields(named, "train"))


def _fields(values: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _fields(value, f"{place}.{name}")
        elif name not in FREE:
            yield f"{place}.{name}", value

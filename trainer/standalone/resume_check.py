"""Check that a configuration may resume a run: settings that a checkpoint depends on must match."""

import json
import os
from collections.abc import Iterator
from typing import Any

from trainer.contract.documents import AttemptSpec, DataFile
from trainer.contract.train import TrainConfig

SHOWN = 60
MAY_CHANGE = frozenset({
    "epochs", "max_steps", "micro_batch", "precision", "tf32", "fp8", "compile", "attention", "gradient_checkpointing",
    "trust_remote_code", "eval_every_steps", "guard", "selection.patience", "selection.min_delta", "output", "metrics",
    "data.path", "data.secret", "data.format", "data.bad_share", "diffusion.cache", "diffusion.sample_steps",
})  # fmt: skip
"""Settings that may change: duration, speed and destinations; the rows are compared by their hash. All other
settings are fixed, including those of later versions.
"""


def changed(began: AttemptSpec, data: DataFile, train: TrainConfig) -> str | None:
    """Return one line on what changed since the run began, and the fix; None if nothing did.

    `global_batch: auto` means the number that the run began with.
    """
    if began.data is not None and began.data.sha256 != data.sha256:
        old_sha256, new_sha256 = f"{began.data.sha256[:12]}...", f"{data.sha256[:12]}..."
        return (
            f"data.path: {train.data.path} has changed since this run began (sha256 {old_sha256}, now {new_sha256}); "
            "give it back as it was, or another --output"
        )
    assert began.train is not None
    if train.global_batch == "auto":
        train = train.model_copy(update={"global_batch": began.train.global_batch})
    for key, before, after in _differing(began.train.model_dump(mode="json"), train.model_dump(mode="json")):
        change = f"this run began with {_value_text(before)}, now it is {_value_text(after)}"
        return f"{key}: {change}; set it back, or give another --output"
    return None


def _differing(before: Any, after: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    if key in MAY_CHANGE or before == after:
        return
    if key == "model" and os.path.isabs(before) and os.path.isabs(after):
        return  # the folder may have moved; its content is checked when the model is loaded
    if not (isinstance(before, dict) and isinstance(after, dict)):
        yield key, before, after
        return
    if before.get("kind") != after.get("kind"):  # for another kind all other settings differ as well
        yield f"{key}.kind", before.get("kind"), after.get("kind")
        return
    for name in before | after:
        yield from _differing(before.get(name), after.get(name), f"{key}.{name}" if key else name)


def _value_text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."

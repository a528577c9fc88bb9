"""Settings for bad steps, early stopping and the choice of the resulting weights."""

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from trainer.contract import object_keys
from trainer.contract.base import Config, Text

LOSS = "loss"
"""Name of the held-out loss as a metric."""


class GuardConfig(Config):
    """Reaction to a step whose loss or gradients are not finite."""

    skip: Annotated[int, Field(ge=0, le=1000)] = 3
    """Consecutive bad steps to skip: their rows are passed over and the weights stay unchanged. One more bad step
    causes a rollback.
    """
    rollbacks: Annotated[int, Field(ge=0, le=10)] = 1
    """Rollbacks that leave out the rows of the bad steps; after the last one the job fails."""
    back_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """Steps before the first bad step to which a rollback returns."""
    deviations: Annotated[float, Field(gt=0, le=1e6)] = 10.0
    """A loss or gradient norm this many deviations above the median of the last 64 steps is reported as an event."""


class SelectionConfig(Config):
    """Decisions based on evaluations; they need `eval_every_steps` and held-out rows."""

    metric: Annotated[Text, Field(min_length=1, max_length=64)] = LOSS
    """`loss` (held-out loss) or a metric of the task, such as `accuracy`. Lower is better for errors."""
    patience: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Stop after this many consecutive evaluations without improvement over the best earlier evaluation; absent: no
    early stop.
    """
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """Smallest improvement that counts for `patience`."""
    best: bool = False
    """Return the weights of the best evaluation instead of the last weights. Every checkpoint then holds both;
    `min_delta` does not apply.
    """


def rollback_manifests(committed: Iterable[str], floor: int, guard: GuardConfig | None) -> frozenset[str]:
    """Return the committed manifests that must stay so that a training can roll back.

    The trainer applies this rule to its own attempt, the broker to earlier attempts. `floor` is the step of the
    earliest checkpoint that the training may be at; that checkpoint stays anyway.

    A rollback after `floor` returns to step `reach` or later, and starts from the last checkpoint at or before that
    step. So the last checkpoint at or before `reach` stays. The first one after `reach` stays too: `reach` grows with
    `floor`, and this checkpoint then replaces the former. Without it, a rollback would recompute ever more steps.
    """
    if guard is None or not guard.rollbacks:
        return frozenset()
    reach = floor - guard.skip - guard.back_steps
    checkpoints = sorted((object_keys.step_of(key), key) for key in object_keys.manifests(committed))
    before = [key for step, key in checkpoints if step <= reach]
    after = [key for step, key in checkpoints if reach < step <= floor]
    return frozenset([*before[-1:], *after[:1]])

"""What watches over a training: steps that go wrong, when enough is enough, and which weights are the result."""

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from trainer.contract import object_keys as keys
from trainer.contract.base import Config, Text

LOSS = "loss"
"""The held-out loss, as a metric."""


class GuardConfig(Config):
    """What follows a step whose loss or gradients are not finite numbers."""

    skip: Annotated[int, Field(ge=0, le=1000)] = 3
    """Such steps in a row that are left out: their rows are passed, the weights stay. One more goes back."""
    rollbacks: Annotated[int, Field(ge=0, le=10)] = 1
    """How often the training goes back and leaves out the rows of the bad steps; then the job fails."""
    back_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """How many steps before the first bad one it goes back to."""
    deviations: Annotated[float, Field(gt=0, le=1e6)] = 10.0
    """A loss or a norm of gradients so many deviations above the median of the last 64 steps is told as an event."""


class SelectionConfig(Config):
    """What the evaluations decide; they need `eval_every_steps` and held-out rows."""

    metric: Annotated[Text, Field(min_length=1, max_length=64)] = LOSS
    """`loss`, the held-out one, or a metric of the task, such as `accuracy`; errors count as better when lower."""
    patience: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """The training ends after so many evaluations in a row that were no better than the best one before them."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """For `patience` an evaluation is better when it is better by more than this."""
    best: bool = False
    """The weights of the best evaluation, by however little, are the result rather than the last ones. Every checkpoint
    holds them."""


def way_back(committed: Iterable[str], floor: int, guard: GuardConfig | None) -> frozenset[str]:
    """Of the committed manifests those that stay so that a training may go back, which the trainer obeys in its own
    attempt and the broker in those before.

    `floor`: the step of the earliest checkpoint that the training may be at, which stays anyway. From behind it a bad
    passage leads back to `reach` or later, and there the furthest one before begins. The first one after `reach`
    stays too: it is the next to be the furthest, and were it gone, `reach` would leave the other further and further
    behind.
    """
    if guard is None or not guard.rollbacks:
        return frozenset()
    reach = floor - guard.skip - guard.back_steps
    found = sorted((keys.step_of(key), key) for key in keys.manifests(committed))
    before = [key for step, key in found if step <= reach]
    after = [key for step, key in found if reach < step <= floor]
    return frozenset([*before[-1:], *after[:1]])

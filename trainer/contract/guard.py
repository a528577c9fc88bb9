"""What watches over a training: steps that go wrong, when enough is enough, and which weights are the result."""

from typing import Annotated

from pydantic import Field

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
    """An evaluation is better when it is better by more than this."""
    best: bool = False
    """The weights of the best evaluation are the result, rather than the last ones. Every checkpoint holds them."""

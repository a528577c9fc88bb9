"""Metrics of a job in API responses: columns of equal length with one entry per step."""

from typing import Annotated

from pydantic import Field

from broker.api.schemas.base import Wire
from broker.domain.job import Reason
from broker.reporting.notebook_html import plot_svg
from trainer.contract.base import Config


class MetricsQuery(Config):
    after: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Return only steps after this one."""
    points: Annotated[int, Field(ge=2, le=10_000)] = 1000
    """Maximum number of points; more steps are reduced to means."""


class InterruptionView(Wire):
    """End of an attempt before the job was done."""

    attempt: int
    step: int
    reason: Reason


class MetricsView(Wire):
    """Steps of all attempts on one axis."""

    step: tuple[int, ...]
    attempt: tuple[int, ...]
    """Number of the attempt that did the step; 0: not recorded."""
    time: tuple[float | None, ...]
    """Seconds since 1970; null: reported by a heartbeat only."""
    loss: tuple[float | None, ...]
    lr: tuple[float | None, ...]
    tokens_per_s: tuple[float | None, ...]
    total: int
    """Number of steps before the reduction."""
    skipped_bytes: int = 0
    """Bytes at the start of a long journal that were not read; 0: the journal was read as a whole."""
    interruptions: tuple[InterruptionView, ...]

    def _repr_html_(self) -> str:
        """Return plots of loss and speed, for notebooks."""
        marks = [(end.step, end.reason.value) for end in self.interruptions]
        loss = plot_svg("loss", zip(self.step, self.loss, strict=True), marks)
        return loss + plot_svg("tokens/s", zip(self.step, self.tokens_per_s, strict=True), marks)

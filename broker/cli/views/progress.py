"""Progress of a job: redrawn on a terminal, printed as plain lines otherwise."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from types import TracebackType
from typing import Protocol, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from broker.api.schemas.jobs import EventView, JobDetail
from broker.cli.core import formatting
from broker.cli.core.output import Output
from broker.domain.formatting import visible
from broker.domain.job import JobState
from trainer.contract.documents import Heartbeat

PLAIN_EVERY_S = 15.0


@dataclass(frozen=True, kw_only=True)
class View:
    """Progress of a job at one moment."""

    state: str
    where: str
    step: int
    total: int
    loss: float | None
    tokens_per_s: float | None
    spent: Decimal
    cap: Decimal
    left_s: float | None = None
    """Seconds of training left at the present speed; None: unknown."""
    warnings: tuple[str, ...] = ()
    """Warnings of the forecast, and of an idle machine."""

    def line(self) -> str:
        """Return `training · step 12/45 · loss 3.210 · 812 tokens/s · $0.0312 of $0.50 · machine`."""
        parts = [self.state]
        if self.total:
            parts.append(f"step {self.step}/{self.total}")
        parts += self.numbers()
        return " · ".join([*parts, self.where] if self.where else parts)

    def numbers(self) -> list[str]:
        parts = [] if self.loss is None else [f"loss {self.loss:.3f}"]
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        parts.append(f"{formatting.money(self.spent)} of {formatting.money(self.cap)}")
        left = [] if self.left_s is None else [f"{formatting.duration(self.left_s)} left"]
        return [*parts, *left, *self.warnings]


def view(job: JobDetail) -> View:
    """Return the progress of the job from the latest heartbeat of its latest attempt."""
    run = job.runs[-1] if job.runs else None
    beat = run.beat if run else None
    beats = [r.beat for r in job.runs if r.beat is not None]
    return View(
        state=_state(job),
        where=formatting.machine(run) if run and job.state is JobState.ACTIVE else job.reason,
        step=next((b.step for b in reversed(beats) if b.step), 0),
        total=max((b.total_steps for b in beats), default=0),
        loss=beat.loss if beat else None,
        tokens_per_s=beat.tokens_per_s if beat else None,
        spent=job.spent_usd,
        cap=job.cap_usd,
        left_s=_seconds_left(job, beat),
        warnings=_warnings(job),
    )


def _warnings(job: JobDetail) -> tuple[str, ...]:
    forecast, idle = job.forecast, job.runs[-1].idle if job.runs and job.state is JobState.ACTIVE else None
    warnings = [] if idle is None else [f"idle ({idle})"]
    if forecast is not None and forecast.over_cap:
        warnings.append(f"{formatting.money(forecast.usd)} expected, above the cap")
    if forecast is not None and forecast.late:
        warnings.append(f"too late: {forecast.finish_at:%Y-%m-%d %H:%M} UTC expected")
    return tuple(warnings)


def _seconds_left(job: JobDetail, beat: Heartbeat | None) -> float | None:
    if beat is None or beat.phase != "training" or not beat.rows_per_s or job.spec.train is None:
        return None
    return (beat.total_steps - beat.step) * job.spec.train.global_batch_rows / beat.rows_per_s


def _state(job: JobDetail) -> str:
    if job.state is not JobState.ACTIVE or not job.runs:
        return job.state.value
    run = job.runs[-1]
    phase = run.beat.phase if run.beat and run.beat.phase not in ("training", "starting") else ""
    return f"attempt {run.number} {run.state.value}" + (f" ({phase})" if phase else "")


def event_line(event: EventView) -> str:
    """Return `12:30:05 attempt.preempted  cloud-a took the machine at step 17`."""
    at = event.at.astimezone().strftime("%H:%M:%S") if event.at else "--:--:--"
    return visible(f"{at}  {event.kind:<20} {event.message}")


class Display(Protocol):
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def event(self, event: EventView) -> None: ...
    def show(self, view: View) -> None: ...
    def note(self, text: str) -> None: ...


def display(out: Output) -> Display:
    return LiveDisplay(out) if out.live else PlainDisplay(out)


class LiveDisplay:
    """A display on a terminal: events scroll above two redrawn lines, the state and a progress bar."""

    def __init__(self, out: Output) -> None:
        self._out = out
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}"))
        self._progress = Progress(*columns, console=out.console)
        self._task: TaskID = self._progress.add_task("", total=None, numbers="")
        self._state = Text("")
        self._live = Live(self._render(), console=out.console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def _render(self) -> RenderableType:
        return Group(self._state, self._progress)

    def event(self, event: EventView) -> None:
        style = "yellow" if "preempt" in event.kind else "dim"
        self._live.console.print(Text(event_line(event), style=style))

    def show(self, view: View) -> None:
        self._state = Text(visible(f"{view.state} · {view.where}" if view.where else view.state), style="bold")
        numbers = " · ".join(view.numbers())
        self._progress.update(self._task, completed=view.step, total=view.total or None, numbers=numbers)
        self._live.update(self._render())

    def note(self, text: str) -> None:
        self._state = Text(text, style="red")
        self._live.update(self._render())


class PlainDisplay:
    """A display for logs: every event, and the progress when the state changes or after `PLAIN_EVERY_S`."""

    def __init__(self, out: Output, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._monotonic = monotonic
        self._last = ""
        self._state = ""
        self._at = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def event(self, event: EventView) -> None:
        self._out.print(event_line(event))

    def show(self, view: View) -> None:
        line, now = view.line(), self._monotonic()
        if line == self._last or (view.state == self._state and now - self._at < PLAIN_EVERY_S):
            return
        self._last, self._state, self._at = line, view.state, now
        self._out.print(f"          {line}")

    def note(self, text: str) -> None:
        if text != self._last:
            self._last = text
            self._out.print(f"          {text}")

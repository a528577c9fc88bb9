"""`broker.fit(...)`: a fine-tune in one call, from rows to files."""

import asyncio
import functools
import json
import os
import secrets
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from broker.api.schemas.jobs import EventView, JobDetail
from broker.api.schemas.metrics import MetricsView
from broker.client.async_client import AsyncClient
from broker.client.files import save, select_results
from broker.client.notebook import LiveProgress, NotebookPanel, kernel_display
from broker.client.transport.errors import ApiError, NotFinished
from broker.client.transport.loop_thread import LoopThread
from broker.domain.formatting import visible
from broker.domain.job import JobState
from broker.domain.money import usd
from broker.reporting.loss_curve import Losses, losses
from broker.reporting.notebook_html import plot_svg, text_html

RETRY_FOR_S = 900.0
"""Seconds to wait for a daemon that restarts."""
POLL_S = 3.0
"""Seconds between two snapshots in a notebook."""
PLOT_POINTS = 300
METRICS = "metrics.jsonl"

P = ParamSpec("P")
R = TypeVar("R")
Progress = Callable[[EventView], None]
Rows = str | os.PathLike[str] | Iterable[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A finished fine-tune."""

    job: JobDetail
    folder: Path
    """Folder of the files: `adapter/` or `model/`, metrics, samples."""
    files: tuple[Path, ...]
    losses: Losses

    def _repr_html_(self) -> str:
        """Return the receipt, the loss curve and the folder, for notebooks."""
        curve = plot_svg("loss", self.losses)
        return f"{self.job._repr_html_()}{curve}<p>{len(self.files)} files in {text_html(str(self.folder))}</p>"

    @property
    def usd(self) -> Decimal:
        """Dollars spent."""
        return self.job.spent_usd


def print_event(event: EventView) -> None:
    """Write an event as one line to stderr; the default of `progress`."""
    line = visible(f"{event.kind}: {event.message}" if event.at else event.message)
    sys.stderr.write(f"{event.at:%H:%M:%S} {line}\n" if event.at else f"{line}\n")


def _panel(progress: Progress | None) -> Progress | None:
    """Return a panel instead of `print_event` inside a notebook."""
    display = kernel_display() if progress is print_event else None
    return progress if display is None else NotebookPanel(display)


async def afit(
    model: str,
    data: Rows,
    *,
    cap_usd: Decimal | int | str,
    prompt: str | None = None,
    completion: str | None = None,
    to: str | os.PathLike[str] | None = None,
    name: str = "fit",
    key: str | None = None,
    progress: Progress | None = print_event,
    train: Mapping[str, Any] | None = None,
    spec: Mapping[str, Any] | None = None,
    client: AsyncClient | None = None,
) -> Fitted:
    """Fine-tune `model` on `data` for at most `cap_usd`, wait for the end and download the result.

    `data`: a CSV, JSON or JSONL file, or rows as mappings. `prompt`, `completion`: templates over its columns, by
    default the columns of these names; a task that needs other columns names them in `train`. `to`: folder for the
    files, by default named by the job's id. `key`: a second call with the same key and input waits for the same job.
    `train`, `spec`: more settings of `train` and of the job (docs/reference/spec.md).
    Cancelling the call does not cancel the job. `fit` is the same as a blocking call, for scripts and notebooks.

    Raises NotFinished when the job failed, was cancelled or reached its cap; ApiError, DaemonUnreachable, NotSaved.
    Raises ValueError for an invalid amount, and if neither `completion` nor `train` says which column to learn.
    """
    async with client or AsyncClient.found(retry_for_s=RETRY_FOR_S) as connected:
        file, content = _content(data)
        upload = await connected.upload(content, name=file)
        columns = tuple((upload.summary or {}).get("columns", ()))
        rows = {**_columns(train or {}, file, columns, prompt, completion), "path": upload.ref}
        job_spec = {
            **(spec or {}),
            "name": name,
            "cap_usd": str(_dollars(cap_usd)),
            "train": {**(train or {}), "model": model, "data": rows},
        }
        job = await connected.submit(job_spec, key=key or secrets.token_hex(16))
        return await _finished(connected, job.id, _panel(progress), to)


async def _finished(
    client: AsyncClient, job_id: str, progress: Progress | None, to: str | os.PathLike[str] | None
) -> Fitted:
    """Wait for a job's end and fetch its results. Raises NotFinished."""
    polling = asyncio.create_task(_poll(client, job_id, progress)) if isinstance(progress, LiveProgress) else None
    try:
        async for event in client.events(job_id):
            if progress is not None:
                progress(event)
    finally:
        if polling is not None:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
    detail = await client.job(job_id)
    if isinstance(progress, LiveProgress):
        progress.snapshot(detail, await _series(client, job_id))
    if detail.state is not JobState.SUCCEEDED:
        raise NotFinished(detail)
    return await _fetched(client, detail, Path(to or detail.id))


async def _poll(client: AsyncClient, job_id: str, progress: LiveProgress) -> None:
    """Show the job until cancelled. An error ends the polling, because the events raise it too."""
    while True:
        progress.snapshot(await client.job(job_id), await _series(client, job_id))
        await asyncio.sleep(POLL_S)


async def _series(client: AsyncClient, job_id: str) -> MetricsView | None:
    """Return the steps of the job; None if they cannot be read now."""
    try:
        return await client.metrics(job_id, points=PLOT_POINTS)
    except ApiError:
        return None


def _columns(
    train: Mapping[str, Any], file: str, columns: tuple[str, ...], prompt: str | None, completion: str | None
) -> dict[str, Any]:
    """Return `train.data` with the templates of a `causal_lm`. Raises ValueError if no completion is named."""
    more = dict(train.get("data", {}))
    if train.get("task", "causal_lm") == "causal_lm" and not more.get("messages"):
        for column, template in (("prompt", prompt), ("completion", completion)):
            more[column] = _template(more.get(column) if template is None else template, column, columns)
        if not more["completion"]:
            raise ValueError(_nothing_to_learn(file, columns))
    return more


def _blocking(work: Callable[P, Coroutine[Any, Any, R]], name: str) -> Callable[P, R]:
    """Return `work` as a blocking function of the same signature, with its own event loop.

    If the caller's thread runs an event loop, as in a notebook, the work runs in another thread. `progress` is still
    called in the caller's thread, because output of other threads may appear elsewhere or never.
    """

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(work(*args, **kwargs))
        return _in_thread(work, *args, **kwargs)

    run.__name__ = run.__qualname__ = name
    return run


def _in_thread(work: Callable[P, Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run `work` in another thread, and its `progress` in this one. Ctrl-C, or an error of `progress`, cancels it."""
    calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
    progress: Any = kwargs.get("progress", print_event)
    progress = _panel(progress)
    if isinstance(progress, LiveProgress):
        kwargs["progress"] = _QueuedProgress(calls, progress)
    elif progress is not None:
        kwargs["progress"] = lambda event: calls.put(lambda: progress(event))
    coroutine = work(*args, **kwargs)
    loop = LoopThread()
    try:
        future = loop.start(coroutine)
        future.add_done_callback(lambda _: calls.put(None))
        while (call := calls.get()) is not None:
            call()
        return future.result()
    finally:
        loop.stop()


class _QueuedProgress:
    """Passes events and snapshots to the thread that reads the queue."""

    def __init__(self, calls: "SimpleQueue[Callable[[], None] | None]", progress: LiveProgress) -> None:
        self._calls = calls
        self._progress = progress

    def __call__(self, event: EventView) -> None:
        self._calls.put(lambda: self._progress(event))

    def snapshot(self, job: JobDetail, series: MetricsView | None) -> None:
        self._calls.put(lambda: self._progress.snapshot(job, series))


fit = _blocking(afit, "fit")


def _dollars(cap_usd: Decimal | int | str) -> Decimal:
    try:
        return usd(cap_usd)
    except InvalidOperation:
        raise ValueError(f"cap_usd: {cap_usd!r} is not an amount of dollars; write it as '2.50'") from None


async def _fetched(c: AsyncClient, job: JobDetail, folder: Path) -> Fitted:
    files = await save(c, job.id, select_results(await c.artifacts(job.id)), folder)
    metrics = folder / METRICS
    curve = losses(metrics.read_bytes()) if metrics in files else ()
    return Fitted(job=job, folder=folder, files=tuple(files), losses=curve)


def _content(data: Rows) -> tuple[str, bytes | Path]:
    """Return (name, content to send): a file, or rows as JSONL. Raises TypeError, ValueError."""
    if isinstance(data, str | os.PathLike):
        path = Path(data)
        return path.name, path
    return "rows.jsonl", "".join(json.dumps(dict(row), allow_nan=False) + "\n" for row in data).encode()


def _template(template: str | None, column: str, columns: Iterable[str]) -> str:
    """Return the given template, by default the column of that name; empty if there is no such column."""
    if template is not None:
        return template
    return f"{{{column}}}" if column in columns else ""


def _nothing_to_learn(file: str, columns: Sequence[str]) -> str:
    has = f"has the columns {', '.join(columns)} and" if columns else "has"
    example = columns[-1] if columns else "answer"
    return f'completion: {file} {has} no column completion; say what is to be learned, e.g. completion="{{{example}}}"'

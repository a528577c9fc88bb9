"""`broker.fit(...)`: a fine-tune as one call, from rows to files."""

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from broker.api.models import EventView, JobDetail
from broker.client.client import AsyncClient
from broker.client.errors import NotFinished
from broker.client.files import chosen, save
from broker.decide.curve import Losses, losses
from broker.domain.job import JobState
from broker.domain.money import usd

PATIENCE_S = 900.0
"""A daemon that is started again meanwhile is waited for so long."""
METRICS = "metrics.jsonl"

Rows = str | os.PathLike[str] | Iterable[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A finished fine-tune."""

    job: JobDetail
    folder: Path
    """Where its files lie: `adapter/` or `model/`, metrics, samples."""
    files: tuple[Path, ...]
    losses: Losses

    @property
    def usd(self) -> Decimal:
        """What it cost."""
        return self.job.spent_usd


def say(event: EventView) -> None:
    """The default of `progress`: one line an event, to stderr."""
    sys.stderr.write(f"{event.at:%H:%M:%S} {event.kind}: {event.message}\n" if event.at else f"{event.message}\n")


def fit(
    *,
    model: str,
    data: Rows,
    cap_usd: Decimal | int | str,
    prompt: str | None = None,
    completion: str | None = None,
    to: str | os.PathLike[str] | None = None,
    name: str = "fit",
    key: str | None = None,
    progress: Callable[[EventView], None] | None = say,
    train: Mapping[str, Any] | None = None,
    spec: Mapping[str, Any] | None = None,
    client: AsyncClient | None = None,
) -> Fitted:
    """Fine-tunes `model` on `data` for at most `cap_usd`, waits for the end and fetches the result. Blocks.

    `data`: a CSV, JSON or JSONL file, or rows as mappings. `prompt`, `completion`: templates over its columns; without
    them the columns of these names. `to`: folder for the files, by default one of the job's own id. `key`: a second
    call with the same key and input waits for the first one's job. `train`, `spec`: more settings of `train` and of
    the job (docs/spec.md). Ctrl-C stops waiting, and the job goes on.

    Raises NotFinished when the job failed, was cancelled or reached its cap; ApiError, Unreachable, NotSaved.
    """
    return asyncio.run(
        afit(
            model=model, data=data, cap_usd=cap_usd, prompt=prompt, completion=completion, to=to, name=name, key=key,
            progress=progress, train=train, spec=spec, client=client,
        )
    )  # fmt: skip


async def afit(
    *,
    model: str,
    data: Rows,
    cap_usd: Decimal | int | str,
    prompt: str | None = None,
    completion: str | None = None,
    to: str | os.PathLike[str] | None = None,
    name: str = "fit",
    key: str | None = None,
    progress: Callable[[EventView], None] | None = say,
    train: Mapping[str, Any] | None = None,
    spec: Mapping[str, Any] | None = None,
    client: AsyncClient | None = None,
) -> Fitted:
    """`fit` for programs with an event loop."""
    async with client or AsyncClient.found(patience_s=PATIENCE_S) as c:
        file, content = _content(data)
        kept = await c.upload(content, name=file)
        columns = (kept.summary or {}).get("columns", ())
        templates = {
            "prompt": _template(prompt, "prompt", columns),
            "completion": _template(completion, "completion", columns),
        }
        asked = {
            **(spec or {}),
            "name": name,
            "cap_usd": str(_dollars(cap_usd)),
            "train": {**(train or {}), "model": model, "data": {"path": kept.ref, **templates}},
        }
        job = await c.submit(asked, key=key or secrets.token_hex(16))
        async for event in c.events(job.id):
            if progress is not None:
                progress(event)
        detail = await c.job(job.id)
        if detail.state is not JobState.SUCCEEDED:
            raise NotFinished(detail)
        return await _fetched(c, detail, Path(to or detail.id))


def _dollars(cap_usd: Decimal | int | str) -> Decimal:
    try:
        return usd(cap_usd)
    except InvalidOperation:
        raise ValueError(f"cap_usd: {cap_usd!r} is no amount of dollars; write it as '2.50'") from None


async def _fetched(c: AsyncClient, job: JobDetail, folder: Path) -> Fitted:
    files = await save(c, job.id, chosen(await c.artifacts(job.id)), folder)
    metrics = folder / METRICS
    curve = losses(metrics.read_bytes()) if metrics in files else ()
    return Fitted(job=job, folder=folder, files=tuple(files), losses=curve)


def _content(data: Rows) -> tuple[str, bytes]:
    """(name, bytes) of a file, or of rows as JSONL. Raises OSError, TypeError, ValueError."""
    if isinstance(data, str | os.PathLike):
        path = Path(data)
        return path.name, path.read_bytes()
    return "rows.jsonl", "".join(json.dumps(dict(row), allow_nan=False) + "\n" for row in data).encode()


def _template(given: str | None, column: str, columns: Iterable[str]) -> str:
    if given is not None:
        return given
    return f"{{{column}}}" if column in columns else ""

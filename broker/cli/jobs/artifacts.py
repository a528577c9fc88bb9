"""Download a job's files, and read its metrics and samples."""

import json
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from broker.api.schemas.files import ArtifactView
from broker.cli.core.exit_codes import NotFoundExit
from broker.cli.core.output import Output
from broker.cli.views.summary_data import Sample
from broker.client.async_client import AsyncClient
from broker.client.files import save
from broker.reporting.loss_curve import Losses, losses


@dataclass(frozen=True, kw_only=True)
class ArtifactMessages:
    """Contents of the small result files; empty if a job has none."""

    losses: Losses = ()
    samples: tuple[Sample, ...] = ()


async def download(client: AsyncClient, job: str, files: list[ArtifactView], folder: Path, out: Output) -> list[Path]:
    """Download and verify each file, then rename it to its final name.

    Raises NotFoundExit when there is no file, and the errors of `files.save`.
    """
    if not files:
        raise NotFoundExit(f"job {job} has no files yet; they come with its first checkpoint")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=out.console, transient=True, disable=not out.live) as bar:
        task = bar.add_task("downloading", total=sum(f.bytes for f in files))
        return await save(client, job, files, folder, lambda file: bar.advance(task, file.bytes))


async def read_messages(client: AsyncClient, job: str) -> ArtifactMessages:
    """Return the metrics and samples of the job's last checkpoint; both files are small."""
    files = {f.path: f for f in (await client.artifacts(job)).items}
    metrics, samples = files.get("metrics.jsonl"), files.get("samples.json")
    return ArtifactMessages(
        losses=losses(await client.artifact(job, metrics)) if metrics else (),
        samples=read_samples(await client.artifact(job, samples)) if samples else (),
    )


def read_samples(raw: bytes) -> tuple[Sample, ...]:
    """Return the samples that the trainer wrote; empty for a file of the same name in another format."""
    try:
        return tuple(
            Sample(prompt=str(s["prompt"]), base=str(s["base"]), tuned=str(s["tuned"])) for s in json.loads(raw)
        )
    except (ValueError, KeyError, TypeError):
        return ()

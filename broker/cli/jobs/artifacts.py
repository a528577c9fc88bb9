"""A job's files for people: how far they have come, and what its metrics and samples say."""

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
    """What the small result files say; empty where a job has none."""

    losses: Losses = ()
    samples: tuple[Sample, ...] = ()


async def download(client: AsyncClient, job: str, files: list[ArtifactView], folder: Path, out: Output) -> list[Path]:
    """Each file is checked, then renamed into its place. Raises NotFound when there is nothing, and as `files.save`."""
    if not files:
        raise NotFoundExit(f"job {job} has no files yet; they come with its first checkpoint")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=out.talk, transient=True, disable=not out.live) as bar:
        task = bar.add_task("downloading", total=sum(f.bytes for f in files))
        return await save(client, job, files, folder, lambda file: bar.advance(task, file.bytes))


async def told(client: AsyncClient, job: str) -> ArtifactMessages:
    """Reads the metrics and samples of the job's last checkpoint; both are small."""
    found = {f.path: f for f in (await client.artifacts(job)).items}
    metrics, samples = found.get("metrics.jsonl"), found.get("samples.json")
    return ArtifactMessages(
        losses=losses(await client.artifact(job, metrics)) if metrics else (),
        samples=read_samples(await client.artifact(job, samples)) if samples else (),
    )


def read_samples(raw: bytes) -> tuple[Sample, ...]:
    """What the trainer wrote; a foreign file of that name gives none."""
    try:
        return tuple(
            Sample(prompt=str(s["prompt"]), base=str(s["base"]), tuned=str(s["tuned"])) for s in json.loads(raw)
        )
    except (ValueError, KeyError, TypeError):
        return ()

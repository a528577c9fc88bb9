"""A job's files on this machine: which ones, and what its metrics and samples say."""

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from broker.api.models import ArtifactList, ArtifactView
from broker.cli.exits import BadInput, NotFound, ServerProblem
from broker.cli.output import Output
from broker.cli.summary import Sample
from broker.client.client import AsyncClient
from broker.decide.curve import Losses, losses

RESULTS = ("adapter/", "model/", "metrics.jsonl", "samples.json", "eval.json")
"""What a fine-tune leaves for people; the rest of its last checkpoint is for resuming."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the small result files say; empty where a job has none."""

    losses: Losses = ()
    samples: tuple[Sample, ...] = ()


def chosen(found: ArtifactList, *, every: bool) -> list[ArtifactView]:
    """The results of a fine-tune, or every file: with `every`, of a script, and of a checkpoint on the way."""
    results = [f for f in found.items if f.path.startswith(RESULTS)]
    return list(found.items) if every or not found.complete or not results else results


async def download(client: AsyncClient, job: str, files: list[ArtifactView], folder: Path, out: Output) -> list[Path]:
    """Each file is checked, then renamed into its place. Raises NotFound when there is nothing, BadInput."""
    if not files:
        raise NotFound(f"job {job} has no files yet; they come with its first checkpoint")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    written: list[Path] = []
    with Progress(*columns, console=out.talk, transient=True, disable=not out.live) as bar:
        task = bar.add_task("downloading", total=sum(f.bytes for f in files))
        for file in files:
            target = _inside(folder, file.path)
            keep(target, await client.artifact(job, file))
            written.append(target)
            bar.advance(task, file.bytes)
    return written


def keep(target: Path, data: bytes) -> None:
    """Renames the whole file into its place. Raises BadInput."""
    beside = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(data)
        beside.replace(target)
    except OSError as e:
        raise BadInput(f"--to: {target}: {e.strerror}; name a folder that you can write") from None


async def told(client: AsyncClient, job: str) -> Told:
    """Reads the metrics and samples of the job's last checkpoint; both are small."""
    found = {f.path: f for f in (await client.artifacts(job)).items}
    metrics, samples = found.get("metrics.jsonl"), found.get("samples.json")
    return Told(
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


def _inside(folder: Path, path: str) -> Path:
    """A rented machine chose the path: it must stay below the folder."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise ServerProblem(f"the file {path!r} would lie outside of {folder}; nothing more was written")
    return folder.joinpath(*pure.parts)

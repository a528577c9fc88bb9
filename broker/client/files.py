"""A job's files on this machine: which are its results, and how they get into a folder."""

from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from broker.api.schemas.files import ArtifactList, ArtifactView
from broker.client.async_client import AsyncClient
from broker.client.transport.errors import NotSaved

RESULTS = ("adapter/", "model/", "metrics.jsonl", "samples.json", "samples/", "tensorboard/", "eval.json", "README.md")
"""What a fine-tune leaves for people; the rest of its last checkpoint is for resuming."""


def chosen(found: ArtifactList, *, every: bool = False) -> list[ArtifactView]:
    """The results of a fine-tune, or every file: with `every`, of a script, and of a checkpoint on the way."""
    results = [f for f in found.items if f.path.startswith(RESULTS)]
    return list(found.items) if every or not found.complete or not results else results


async def save(
    client: AsyncClient,
    job: str,
    files: Sequence[ArtifactView],
    folder: Path,
    saved: Callable[[ArtifactView], None] = lambda file: None,
) -> list[Path]:
    """Each file is checked, then renamed into its place. Raises NotSaved, Damaged, BrokenOff, ApiError, Unreachable."""
    written: list[Path] = []
    for file in files:
        target = _inside(folder, file.path)
        await client.download(job, file, target)
        written.append(target)
        saved(file)
    return written


def _inside(folder: Path, path: str) -> Path:
    """A rented machine chose the path: it must stay below the folder."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise NotSaved(f"the file {path!r} would lie outside of {folder}; nothing more was written")
    return folder.joinpath(*pure.parts)

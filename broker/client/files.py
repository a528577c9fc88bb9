"""Files of a job on this machine: selects the results and saves them into a folder."""

from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from broker.api.schemas.files import ArtifactList, ArtifactView
from broker.client.async_client import AsyncClient
from broker.client.transport.errors import NotSaved

RESULTS = ("adapter/", "model/", "metrics.jsonl", "samples.json", "samples/", "tensorboard/", "eval.json", "README.md")
"""Results of a fine-tune for users. The other files of its last checkpoint serve to resume."""


def select_results(artifacts: ArtifactList, *, every: bool = False) -> list[ArtifactView]:
    """Return the results of a fine-tune.

    Return every file if `every` is set, if the job is unfinished, or if the job has no such results (a script).
    """
    results = [f for f in artifacts.items if f.path.startswith(RESULTS)]
    return list(artifacts.items) if every or not artifacts.complete or not results else results


async def save(
    client: AsyncClient,
    job: str,
    files: Sequence[ArtifactView],
    folder: Path,
    saved: Callable[[ArtifactView], None] = lambda file: None,
) -> list[Path]:
    """Save files. Each file is verified before it gets its final name.

    Raises NotSaved, Damaged, BrokenOff, ApiError, DaemonUnreachable.
    """
    paths: list[Path] = []
    for file in files:
        target = _inside(folder, file.path)
        await client.download(job, file, target)
        paths.append(target)
        saved(file)
    return paths


def _inside(folder: Path, path: str) -> Path:
    """Return the path below the folder. Raises NotSaved for a path outside, because a rented machine chose the path."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise NotSaved(f"the file {path!r} would lie outside of {folder}; nothing more was written")
    return folder.joinpath(*pure.parts)

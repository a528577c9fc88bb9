"""Uploads and artifacts on the wire."""

from typing import Any

from broker.api.schemas.base import Wire


class ArtifactView(Wire):
    path: str
    bytes: int
    sha256: str


class ArtifactList(Wire):
    """The files of the job's last committed checkpoint."""

    step: int | None
    """Optimizer step of the checkpoint; null while there is none."""
    complete: bool
    """True for the finished job's artifacts."""
    items: tuple[ArtifactView, ...]


class UploadView(Wire):
    ref: str
    """`upload:<sha256>`: what a spec names it by."""
    sha256: str
    bytes: int
    name: str
    summary: dict[str, Any] | None
    """The data check's findings; null for an archive."""

"""Uploads and artifacts on the wire."""

from typing import Any

from broker.api.schemas.base import Wire


class ArtifactView(Wire):
    path: str
    bytes: int
    sha256: str


class ArtifactList(Wire):
    """Files of the job's last committed checkpoint."""

    step: int | None
    """Optimizer step of the checkpoint; null while there is none."""
    complete: bool
    """True if these are the results of a finished job."""
    items: tuple[ArtifactView, ...]


class UploadView(Wire):
    ref: str
    """`upload:<sha256>`, the reference for a spec."""
    sha256: str
    bytes: int
    name: str
    summary: dict[str, Any] | None
    """Findings of the data check; null for an archive."""

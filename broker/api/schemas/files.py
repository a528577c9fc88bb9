"""Uploads and artifacts on the wire."""

from typing import Annotated, Any

from pydantic import Field

from broker.api.schemas.base import Wire
from broker.api.schemas.queries import UploadFormat
from trainer.contract.base import Config, Text


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


class DataImport(Config):
    """A data set that the daemon reads."""

    source: Annotated[Text, Field(min_length=1, max_length=2000)]
    """`hf://datasets/OWNER/NAME`, with `@REVISION` or `/PATTERN`, or an https URL of an allowed host (`data_hosts` of
    the daemon).
    """
    format: UploadFormat | None = None
    """Format of the file. Absent: the ending of its name determines the format."""


class UploadView(Wire):
    ref: str
    """`upload:<sha256>`, the reference for a spec."""
    sha256: str
    bytes: int
    name: str
    summary: dict[str, Any] | None
    """Findings of the data check; null for an archive."""

"""Pages of jobs, and the cursors that clients return for the next page."""

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from broker.domain.errors import InvalidInput, Problem
from broker.domain.ids import JobId
from broker.domain.job import Job


@dataclass(frozen=True, kw_only=True)
class JobsPage:
    jobs: Sequence[Job]
    next: str | None
    """Cursor of the next page; None: this is the last."""


def cursor_of(job: Job) -> str:
    return base64.urlsafe_b64encode(f"{job.created_at.isoformat()} {job.id}".encode()).decode().rstrip("=")


def read_cursor(text: str) -> tuple[datetime, JobId]:
    try:
        when, _, name = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode().partition(" ")
        if re.fullmatch(r"[a-z2-7]{13}", name) is None:
            raise ValueError(name)
        return datetime.fromisoformat(when).astimezone(UTC), JobId(name)
    except (binascii.Error, ValueError, OverflowError):
        raise InvalidInput(Problem(field="cursor", message="is not one of ours; take `next` of a page")) from None

"""Results of `gpubroker doctor`, as text and as JSON, and the checks that the daemon itself reports."""

from dataclasses import asdict, dataclass
from typing import Any

from broker.api.schemas.base import PART_FIXES, Health


@dataclass(frozen=True, kw_only=True)
class DoctorCheck:
    """Result of one check."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


def document(check: DoctorCheck) -> dict[str, Any]:
    return asdict(check)


def line(check: DoctorCheck) -> str:
    """Return `ok       database: ok`, or `PROBLEM  blobs: ...; fix`."""
    fix = f"; {check.fix}" if check.fix and not check.ok else ""
    return f"{'ok' if check.ok else 'PROBLEM':<8} {check.name}: {check.detail}{fix}"


def parts_of(health: Health) -> list[DoctorCheck]:
    """Return one check for each part of the daemon's readiness."""
    return [
        DoctorCheck(name=part, ok=status == "ok", detail=status, fix=PART_FIXES.get(part, ""))
        for part, status in health.checks.items()
    ]

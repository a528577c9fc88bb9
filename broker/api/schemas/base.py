"""Base class of all answers, and the answers of every server: problem documents and health."""

from typing import Literal

from pydantic import ConfigDict, Field

from trainer.contract.base import Described


class Wire(Described):
    """Base class of answers, created from domain objects. Older clients ignore fields of newer servers."""

    model_config = ConfigDict(frozen=True, from_attributes=True, extra="ignore", defer_build=True)


class FieldProblem(Wire):
    field: str
    """Dotted path into the body (`train.data.prompt`), or the name of a parameter."""
    message: str
    """Fault and fix in one line."""


class ProblemView(Wire):
    """An RFC 9457 problem (application/problem+json)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    errors: tuple[FieldProblem, ...] = ()


PART_FIXES = {
    "database": "see the daemon's log; GPUBROKER_DATABASE_URL names another server",
    "blobs": "check the store's credentials with `gpubroker blobs init URL`",
    "broker": "restart `gpubroker serve` and see its log",
}
"""Fix of each part that the daemon's readiness check reports."""


class Health(Wire):
    """Readiness by part. A failing part makes the answer a 503 problem instead, except for `clock`.

    The client returns the status `unavailable` for such a problem.
    """

    status: Literal["ok", "unavailable"]
    checks: dict[str, str] = Field(default_factory=dict)

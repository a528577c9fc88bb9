"""Interface of the two transports, with the calls that a test can make over either."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from broker.api.schemas.files import ArtifactList, UploadView
from broker.api.schemas.jobs import EventView, JobDetail, JobPage, JobView, LedgerList
from broker.api.schemas.metrics import MetricsView
from broker.api.schemas.offers import OfferHistoryView, OfferList, ProviderList
from broker.api.schemas.policies import BudgetList
from broker.api.schemas.quotes import QuoteView

Kind = Literal[
    "invalid", "unauthenticated", "forbidden", "not_found", "conflict", "too_large", "damaged", "unavailable",
    "limited", "deadline", "fault",
]  # fmt: skip


TIMEOUT_S = 300.0
"""Timeout in seconds of a caller that names no deadline, for a busy machine."""


@dataclass
class Refused(Exception):
    """Error in terms that both transports share."""

    kind: Kind
    text: str
    fields: Mapping[str, str] = field(default_factory=dict)
    after_s: float | None = None
    """Seconds after which to ask again."""


@dataclass(frozen=True)
class Piece:
    """Piece of a log; `position` is where to resume."""

    position: str
    attempt: int
    node: int
    text: str


@dataclass(frozen=True)
class End:
    state: str


class Transport(Protocol):
    """Client of one transport. Methods raise Refused. `timeout_s`: the caller's deadline."""

    async def upload(self, data: bytes, *, name: str, sha256: str | None = None) -> UploadView: ...
    async def quote(self, spec: Mapping[str, Any], *, limit: int = 100) -> QuoteView: ...
    async def submit(self, spec: Mapping[str, Any], *, key: str | None = None) -> tuple[JobView, bool]:
        """Submit; return (job, True if it already existed)."""
        ...

    async def job(self, job: str) -> JobDetail: ...
    async def jobs(self, **where: Any) -> JobPage: ...
    async def cancel(self, job: str) -> JobView: ...
    async def retry(self, job: str, *, resume: bool = True, key: str | None = None) -> tuple[JobView, bool]: ...
    async def raise_cap(self, job: str, cap_usd: str) -> JobView: ...
    async def approve(self, job: str, up_to_usd: str | None = None) -> JobView: ...
    async def refuse(self, job: str) -> JobView: ...
    async def budgets(self) -> BudgetList: ...
    async def ledger(self, job: str) -> LedgerList: ...
    async def metrics(self, job: str, *, after: int | None = None, points: int | None = None) -> MetricsView: ...
    def events(
        self, job: str, *, after: int = 0, follow: bool = True, timeout_s: float = TIMEOUT_S
    ) -> AsyncIterator[EventView | End]: ...
    def logs(
        self, job: str, *, attempt: int | None = None, position: str = "", timeout_s: float = TIMEOUT_S
    ) -> AsyncIterator[Piece | End]: ...
    async def artifacts(self, job: str) -> ArtifactList: ...
    async def artifact(self, job: str, path: str) -> tuple[bytes, str]:
        """Return (bytes, sha256 that the server states)."""
        ...

    async def offers(
        self, *, provider: str | None = None, accelerator: Sequence[str] = (), limit: int | None = None
    ) -> OfferList: ...
    async def offer_history(self, **where: Any) -> OfferHistoryView: ...
    async def providers(self) -> ProviderList: ...
    async def check_providers(self) -> ProviderList: ...

"""Use cases of spending reports."""

from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from broker.api.core.auth import Caller
from broker.billing.reconcile import Charged, Invoice, Reconciliation, reconcile
from broker.billing.spending import report
from broker.domain.errors import InvalidInput, Problem
from broker.domain.ids import AttemptId
from broker.domain.money import MICRO, LedgerCategory
from broker.domain.spending import MAX_FINISHED, CalibrationReport, Paid, SpendBy, SpendReport, SpendWindow
from broker.ports import Clock, Store
from broker.reporting.calibration import calibrate
from broker.runtime.cpu_threads import RunCpu

DEFAULT_DAYS = 30
MAX_DAYS = 366


@dataclass(frozen=True, kw_only=True)
class SpendQuery:
    """Parameters of a report. Empty fields mean the last 30 days, and all users that the caller may see."""

    by: SpendBy
    since: datetime | None = None
    until: datetime | None = None
    zone: str = "UTC"
    team: str | None = None
    user: str | None = None


class SpendingService:
    """Use cases of spending. Each report scans the ledger of its window."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def spend(self, caller: Caller, query: SpendQuery) -> tuple[SpendWindow, SpendReport]:
        """Return a spending report. Raises InvalidInput for an invalid window or time zone."""
        window = self._window(query.since, query.until, query.zone)
        paid = await self._store.as_tenant(caller.tenant).paid(window)
        return window, report(_narrowed(paid, query), query.by)

    async def calibration(
        self, caller: Caller, since: datetime | None, until: datetime | None
    ) -> tuple[SpendWindow, CalibrationReport]:
        """Return how well the forecasts of the window's finished jobs held; of many jobs the latest are judged."""
        window = self._window(since, until, "UTC")
        return window, calibrate(await self._store.as_tenant(caller.tenant).finished(window, limit=MAX_FINISHED))

    async def charges(
        self, caller: Caller, cloud: str, since: datetime | None, until: datetime | None
    ) -> tuple[SpendWindow, list[Charged]]:
        """Return compute charges of one cloud by machine.

        An attempt's charges are divided evenly among its machines.
        """
        window = self._window(since, until, "UTC")
        paid = await self._store.as_tenant(caller.tenant).paid(window)
        sums: dict[AttemptId, Decimal] = defaultdict(Decimal)
        for piece in paid.slices:
            if piece.attempt_id is not None and piece.category is LedgerCategory.COMPUTE:
                sums[piece.attempt_id] += piece.usd
        charges: list[Charged] = []
        for attempt_id, usd in sums.items():
            attempt = paid.attempts[attempt_id].attempt
            if attempt.line.offer.cloud == cloud:
                machines = [handle.id for handle in attempt.handles] or [""]
                for machine, share in zip(machines, divided(usd, len(machines)), strict=True):
                    kind, job_id = attempt.line.offer.instance_type, attempt.job_id
                    charges.append(Charged(machine=machine, kind=kind, usd=share, job_id=job_id, attempt_id=attempt_id))
        return window, charges

    async def reconciled(
        self,
        caller: Caller,
        invoice: Invoice,
        since: datetime | None,
        until: datetime | None,
        *,
        tolerance_usd: Decimal,
        run: RunCpu,
    ) -> tuple[SpendWindow, Reconciliation]:
        """Compare an invoice with the ledger over the invoice's time, or over the given one.

        Raises InvalidInput for an invalid window, Busy.
        """
        start, end = invoice.window or (None, None)
        start, end = since or start, until or end
        if start is None or end is None:
            field = "since" if start is None else "until"
            raise InvalidInput(Problem(field=field, message="the invoice contains no times; give since and until"))
        window, charged = await self.charges(caller, invoice.cloud, start, end)
        return window, await run(lambda: reconcile(invoice, charged, tolerance_usd))

    def _window(self, since: datetime | None, until: datetime | None, zone: str) -> SpendWindow:
        try:
            ZoneInfo(zone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            message = f"{zone!r} is not a time zone; use an IANA name such as Europe/Berlin"
            raise InvalidInput(Problem(field="zone", message=message)) from None
        end = until or self._clock.now()
        try:
            start = since or end - timedelta(days=DEFAULT_DAYS)
        except OverflowError:
            message = f"{DEFAULT_DAYS} days before {end} is out of range; give since"
            raise InvalidInput(Problem(field="until", message=message)) from None
        if not start < end:
            raise InvalidInput(Problem(field="since", message=f"{start} is not before {end}; swap them"))
        if end - start > timedelta(days=MAX_DAYS):
            raise InvalidInput(Problem(field="since", message=f"a window of over {MAX_DAYS} days; ask for less"))
        return SpendWindow(since=start, until=end, zone=zone)


def divided(usd: Decimal, parts: int) -> list[Decimal]:
    """Divide `usd` into `parts` amounts in micro-dollars. The first amounts carry the remainder; the sum is exact."""
    micros, rest = divmod(int(usd / MICRO), parts)
    return [MICRO * (micros + (place < rest)) for place in range(parts)]


def _narrowed(paid: Paid, query: SpendQuery) -> Paid:
    if query.team is None and query.user is None:
        return paid
    groups = {
        job_id
        for job_id, job in paid.jobs.items()
        if query.team in (None, job.team) and query.user in (None, job.owner)
    }
    return replace(paid, slices=[piece for piece in paid.slices if piece.job_id in groups])

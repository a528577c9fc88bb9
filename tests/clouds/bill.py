"""The clouds' own bill, computed from the log of created, running and ended machines, without our prices."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import ROUND_CEILING, Decimal
from typing import Literal

from tests.clouds.state import Event

HOUR_S = Decimal(3600)
MONTH_H = Decimal(720)
"""Hours of a month in prices of storage (docs.lambda.ai/public-cloud/billing: `a full month (720 hours)`)."""


@dataclass(frozen=True, kw_only=True)
class Tariff:
    """Rules by which a cloud counts billed time."""

    quantum_s: int
    """Seconds to a multiple of which every run of a machine is rounded up."""
    minimum_s: int = 0
    """Minimum billed seconds of a run."""
    billed_from: Literal["created", "running"]
    source: str


TARIFFS: Mapping[str, Tariff] = {
    "lambda": Tariff(
        quantum_s=60, billed_from="running",
        source="docs.lambda.ai/public-cloud/billing: one-minute increments, from passed health checks to terminate",
    ),
    "runpod": Tariff(
        quantum_s=1, billed_from="created",
        source="docs.runpod.io/accounts-billing/billing: compute and storage per second; the start is assumed",
    ),
    "vast": Tariff(
        quantum_s=1, billed_from="running",
        source="vast.ai/pricing: per second; docs.vast.ai/guides/serverless/pricing: storage also while it is created",
    ),
    "aws": Tariff(
        quantum_s=1, minimum_s=60, billed_from="running",
        source="aws.amazon.com/ec2/pricing/on-demand: per second, 60 s at least",
    ),
}  # fmt: skip


def counted_s(seconds: Decimal, tariff: Tariff) -> Decimal:
    """Return the billed seconds for a run of `seconds`."""
    quanta = (seconds / tariff.quantum_s).to_integral_value(ROUND_CEILING)
    return max(quanta * tariff.quantum_s, Decimal(tariff.minimum_s))


def machine_usd(events: Sequence[Event], until: datetime) -> Decimal:
    """Return the cost of one machine up to `until`, by its events in order.

    A run is an uninterrupted time of computing. The seconds that rounding adds to a run are charged at its last rate.
    Storage is exact.
    """
    tariff = TARIFFS[events[0].cloud]
    total = run_s = rate = Decimal(0)
    for event, end in zip(events, [e.at for e in events[1:]] + [until], strict=True):
        seconds = Decimal(str(max((min(end, until) - event.at).total_seconds(), 0)))
        if event.usd_per_hour == 0 and run_s:
            total += (counted_s(run_s, tariff) - run_s) * rate / HOUR_S
            run_s = Decimal(0)
        if event.usd_per_hour > 0:
            run_s, rate = run_s + seconds, event.usd_per_hour
        total += seconds * (event.usd_per_hour + event.storage_usd_per_hour) / HOUR_S
    if run_s:
        total += (counted_s(run_s, tariff) - run_s) * rate / HOUR_S
    return total


class Bill:
    """The account's bill at one moment."""

    def __init__(self, events: Iterable[Event], until: datetime) -> None:
        self._until = until
        self._machines: dict[str, list[Event]] = {}
        for event in events:
            self._machines.setdefault(event.id, []).append(event)

    def usd(self, prefix: str = "") -> Decimal:
        """Return the dollars of all machines whose name begins with the prefix."""
        return sum((machine_usd(events, self._until) for events in self._named(prefix)), Decimal(0))

    def made(self, prefix: str = "") -> int:
        """Return the number of machines ever created whose name begins with the prefix."""
        return len(self._named(prefix))

    def open(self, prefix: str = "") -> Sequence[str]:
        """Return the ids of machines that still cost money or are still rented."""
        return [events[0].id for events in self._named(prefix) if not _ended(events)]

    def by_name(self) -> Mapping[str, Decimal]:
        """Return dollars by the full name of the machine."""
        names = {events[0].name for events in self._machines.values()}
        return {
            name: sum((machine_usd(e, self._until) for e in self._machines.values() if e[0].name == name), Decimal(0))
            for name in sorted(names)
        }

    def _named(self, prefix: str) -> Sequence[list[Event]]:
        return [events for events in self._machines.values() if events[0].name.startswith(prefix)]


def _ended(events: Sequence[Event]) -> bool:
    """Return True if the broker destroyed the machine or the cloud took it back permanently."""
    last = events[-1]
    return last.kind == "destroyed" or (last.kind == "evicted" and last.cloud in ("lambda", "aws"))

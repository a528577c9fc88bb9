"""Readiness of this installation: database, blob store, broker and clock."""

import asyncio
import logging
from collections.abc import Callable, Mapping

from broker.billing.trusted_time import step_message
from broker.domain.errors import GpubrokerError
from broker.ports import Blobs, Clock, Store
from broker.runtime.clock import clock_skew_message
from trainer.contract import object_keys

log = logging.getLogger(__name__)

OK, FAILING = "ok", "failing"
"""The only texts that callers without a token get, because reasons name hosts and databases."""
REPORTED_ONLY = frozenset({"clock"})
"""Parts whose faults are reported but do not make the installation unready."""


def without_reasons(checks: Mapping[str, str]) -> dict[str, str]:
    """Return the checks without their reasons."""
    return {part: OK if text == OK else FAILING for part, text in checks.items()}


def unready(checks: Mapping[str, str]) -> Mapping[str, str]:
    """Return the faults of all parts that make the installation unready."""
    return {part: text for part, text in checks.items() if text != OK and part not in REPORTED_ONLY}


class Readiness:
    """Checks database, its clock, blob store, broker and this host's clock.

    The broker is ready if its lease changed within `stale_s` of this process' monotonic clock; see
    docs/design/architecture.md.
    """

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        clock: Clock,
        stale_s: float,
        skew: Callable[[], float],
        clock_step: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`skew()`, `clock_step()`: see `DaemonHooks`."""
        self._skew, self._clock_step = skew, clock_step
        self._store = store
        self._blobs = blobs
        self._clock = clock
        self._stale_s = stale_s
        self._lease: bytes | None = None
        self._changed_at = 0.0
        self._asked: asyncio.Task[dict[str, str]] | None = None
        self._logged: dict[str, str] = {}

    async def check(self) -> dict[str, str]:
        """Return `ok` or the fault of each part; never raises.

        Concurrent callers share one check, because callers without a token could otherwise overload the database.
        """
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asked)

    async def _ask(self) -> dict[str, str]:
        checks = await self._look()
        now = without_reasons(checks)
        for part, word in now.items():
            if word != self._logged.get(part, OK):
                log.log(logging.INFO if word == OK else logging.WARNING, "readiness of %s: %s", part, checks[part])
        self._logged = now
        return checks

    async def _look(self) -> dict[str, str]:
        checks = {"database": OK, "blobs": OK, "broker": OK, "clock": clock_skew_message(self._skew()) or OK}
        try:
            await self._store.ping()
            checks["database"] = step_message(self._clock_step()) or OK
        except GpubrokerError as error:
            checks["database"] = str(error)
        try:
            checks["broker"] = self._judge(await self._blobs.get(object_keys.BROKER_LEASE))
        except GpubrokerError as error:
            checks["blobs"] = str(error)
            checks["broker"] = "unknown while the blob store cannot be reached"
        return checks

    def _judge(self, lease: bytes | None) -> str:
        now = self._clock.monotonic()
        if lease is None:
            return "no broker has ever held the lease; start gpubroker serve"
        if lease != self._lease:
            self._lease, self._changed_at = lease, now
        silent = now - self._changed_at
        return OK if silent < self._stale_s else f"the lease did not change for {silent:.0f} s; is a broker running?"

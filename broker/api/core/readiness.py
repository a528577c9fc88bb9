"""Readiness of this installation: database, blob store, broker and clock."""

import asyncio
import logging
import os
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from broker.billing.trusted_time import step_message
from broker.domain.errors import GpubrokerError
from broker.ports import Blobs, Clock, Store
from broker.runtime.clock import clock_skew_message
from trainer.contract import object_keys

log = logging.getLogger(__name__)

T = TypeVar("T")
OK, FAILING = "ok", "failing"
"""The only texts that callers without a token get, because reasons name hosts and databases."""
ANSWER_S = 3.0
"""Seconds that each part may take to answer, so that a fault is reported within 5 s."""
PROBE_BYTES = 64 * 1024
REPORTED_ONLY = frozenset({"clock"})
"""Parts whose faults are reported but do not make the installation unready."""


def without_reasons(checks: Mapping[str, str]) -> dict[str, str]:
    """Return the checks without their reasons."""
    return {part: OK if text == OK else FAILING for part, text in checks.items()}


def unready(checks: Mapping[str, str]) -> Mapping[str, str]:
    """Return the faults of all parts that make the installation unready."""
    return {part: text for part, text in checks.items() if text != OK and part not in REPORTED_ONLY}


async def answer_within(seconds: float, call: Awaitable[T]) -> T:
    """Return the result of a call. Raises TimeoutError in time, also if the call's cancellation takes longer.

    A query of a database that is stopped is one: its connection waits until the server confirms the cancellation.
    """
    task = asyncio.ensure_future(call)
    try:
        finished, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if finished:
        return task.result()
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    task.cancel()
    raise TimeoutError


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
        claim_fault: Callable[[], str] = lambda: "",
        folders: Sequence[Path] = (),
    ) -> None:
        """Create a check. `skew()`, `clock_step()` and `claim_fault()`: see `DaemonHooks`.

        `folders` must be writable; missing ones are not checked.
        """
        self._folders = folders
        self._mark: bytes | None = None
        self._skew, self._clock_step, self._claim_fault = skew, clock_step, claim_fault
        self._store = store
        self._blobs = blobs
        self._clock = clock
        self._stale_s = stale_s
        self._lease: bytes | None = None
        self._changed_at = 0.0
        self._asked: asyncio.Task[dict[str, str]] | None = None
        self._logged: dict[str, str] = {}

    async def read_mark(self) -> None:
        """Read the mark of the blob store that the daemon has checked at its start."""
        try:
            self._mark = await self._blobs.get(object_keys.BLOB_STORE)
        except GpubrokerError as error:
            log.warning("cannot read the mark of the blob store: %s", error)

    async def check(self) -> dict[str, str]:
        """Return `ok` or the fault of each part; never raises.

        Concurrent callers share one check, because callers without a token could otherwise overload the database.
        """
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(self._results())
        return await asyncio.shield(self._asked)

    async def _results(self) -> dict[str, str]:
        checks = await self._check_all()
        now = without_reasons(checks)
        for part, word in now.items():
            if word != self._logged.get(part, OK):
                log.log(logging.INFO if word == OK else logging.WARNING, "readiness of %s: %s", part, checks[part])
        self._logged = now
        return checks

    async def _check_all(self) -> dict[str, str]:
        database, (blobs, broker), disk = await asyncio.gather(
            self._check_in_time("the database", self._database()),
            self._blob_store(),
            self._check_in_time("the disk", asyncio.to_thread(self._writable)),
        )
        if broker == OK:
            broker = self._claim_fault() or OK
        checks = {"database": database, "blobs": blobs, "broker": broker}
        return checks | {"disk": disk, "clock": clock_skew_message(self._skew()) or OK}

    async def _check_in_time(self, part: str, check: Awaitable[str]) -> str:
        """Return the check's text, or its fault if it fails or does not end within ANSWER_S."""
        try:
            return await answer_within(ANSWER_S, check)
        except TimeoutError:
            return f"{part} does not answer within {ANSWER_S:g} s; is its host stopped or overloaded?"
        except GpubrokerError as error:
            return str(error)

    async def _database(self) -> str:
        await self._store.ping()
        await self._store.check_pages()
        return step_message(self._clock_step()) or OK

    async def _blob_store(self) -> tuple[str, str]:
        """Return the faults of the blob store and of the broker, whose lease is in it."""
        lease: list[bytes | None] = []
        fault = await self._check_in_time("the blob store", self._same_store(lease))
        if fault != OK:
            return fault, "unknown while the blob store cannot be used"
        return OK, self._judge(lease[0])

    async def _same_store(self, lease: list[bytes | None]) -> str:
        """Read the lease, and compare the store's mark with the one that this process read first."""
        lease.append(await self._blobs.get(object_keys.BROKER_LEASE))
        mark = await self._blobs.get(object_keys.BLOB_STORE)
        self._mark = self._mark or mark
        if mark == self._mark:
            return OK
        is_missing = "is missing" if mark is None else "is another store's"
        return f"{object_keys.BLOB_STORE} {is_missing}: was the store removed or replaced? put the old one back"

    def _writable(self) -> str:
        """Write, flush and delete a file in each of the daemon's folders."""
        for folder in filter(Path.is_dir, self._folders):
            try:
                with tempfile.TemporaryFile(dir=folder) as file:
                    file.write(bytes(PROBE_BYTES))
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                return f"cannot write to {folder}: {error.strerror}; free space, or make it writable"
        return OK

    def _judge(self, lease: bytes | None) -> str:
        now = self._clock.monotonic()
        if lease is None:
            return "no broker has ever held the lease; start gpubroker serve"
        if lease != self._lease:
            self._lease, self._changed_at = lease, now
        silent = now - self._changed_at
        return OK if silent < self._stale_s else f"the lease did not change for {silent:.0f} s; is a broker running?"

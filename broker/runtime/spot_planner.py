"""Builds spot plans in one process of the daemon, and gives decisions the plans that are ready.

A decision that lacks a plan raises PlanNotReady, and `PlanRound.settle` repeats it once the plan is built. All waits of
a round together are bounded. After that, the policy decides without a model, or the caller skips the decision. Used by
placement, reviews and quotes.
"""

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Final, Protocol, TypeVar

from broker.quote.spot.plan import PLANS, PlanNotReady, SpotPlan, SpotPlanCache, SpotPlanKey, plan_for
from broker.runtime.child_process import start_child
from broker.runtime.spot_plan_process import LENGTH

log = logging.getLogger(__name__)
T = TypeVar("T")

COMMAND: Final = (sys.executable, "-P", "-m", "broker.runtime.spot_plan_process")
WAIT_S: Final = 5.0
"""Seconds for which all decisions of a round together wait for plans; below half of the lease of a claimed job."""
BUILD_LIMIT_S: Final = 60.0
"""Seconds after which the process counts as hung. A build takes 0.04 to 0.7 s."""
MAX_BUILDS: Final = 256
"""Maximum number of keys that wait for the process. More jobs than this decide without a plan at first."""
PAUSE_S: Final = 30.0
"""Seconds after a failed build before the process is started again."""
STDERR_BYTES: Final = 4096
"""Number of last bytes of the process's stderr that are kept for the log."""


class PlanRound(Protocol):
    """Source of plans for the decisions of one round."""

    def __call__(self, key: SpotPlanKey) -> SpotPlan | None: ...

    async def settle(self, decide: Callable[[], Awaitable[T]]) -> T:
        """Return the decision, repeated until it lacks no plan. Raises PlanNotReady if it is to be skipped."""
        ...


class PlanRounds(Protocol):
    def begin(self, *, has_fallback: bool = True) -> PlanRound:
        """Return the source for one round. `has_fallback`: the policy may decide without a plan."""
        ...


class _InlineRound:
    def __call__(self, key: SpotPlanKey) -> SpotPlan | None:
        return plan_for(key)

    async def settle(self, decide: Callable[[], Awaitable[T]]) -> T:
        return await decide()


class InlinePlans:
    """Builds each plan where it is needed, for tests, simulation and offline use."""

    def begin(self, *, has_fallback: bool = True) -> PlanRound:
        return _InlineRound()


class SpotPlanner:
    """Owner of the process, which is started by the first build and again after it has failed."""

    def __init__(
        self, *, cache: SpotPlanCache = PLANS, command: Sequence[str] = COMMAND, wait_s: float = WAIT_S,
        build_limit_s: float = BUILD_LIMIT_S, monotonic: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.cache = cache
        self.wait_s = wait_s
        self._command = command
        self._build_limit_s = build_limit_s
        self._builds: dict[SpotPlanKey, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._monotonic = monotonic
        self._paused_until: float | None = None
        self._stderr = b""
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    def within(cls, stack: contextlib.AsyncExitStack) -> "SpotPlanner":
        """Return a planner that the stack closes."""
        planner = cls()
        stack.push_async_callback(planner.close)
        return planner

    def begin(self, *, has_fallback: bool = True) -> PlanRound:
        return _PlannerRound(self, has_fallback=has_fallback)

    def request(self, key: SpotPlanKey) -> asyncio.Task[None] | None:
        """Return the build of a key, which all callers share; None: too many keys wait already."""
        build = self._builds.get(key)
        if build is None and len(self._builds) < MAX_BUILDS:
            build = self._builds[key] = asyncio.create_task(self._build(key), name="spot plan")
            build.add_done_callback(lambda _: self._builds.pop(key, None))
        return build

    async def close(self) -> None:
        """End all builds and the process."""
        builds = list(self._builds.values())
        for build in builds:
            build.cancel()
        await asyncio.gather(*builds, return_exceptions=True)
        await self._end_process()

    async def _build(self, key: SpotPlanKey) -> None:
        """Build and keep a plan. An error is logged, because the caller decides without the plan then."""
        async with self._turn:
            if self._paused_until is not None and self._monotonic() < self._paused_until:
                return
            try:
                async with asyncio.timeout(self._build_limit_s):
                    self.cache.add(SpotPlan(key, await self._packed(key)))
            except (OSError, EOFError, TimeoutError) as error:
                await self._end_process()
                self._paused_until = self._monotonic() + PAUSE_S
                lines = self._stderr.decode(errors="replace").strip().splitlines()
                why = f"{type(error).__name__}: {error}" + (f"; its last output: {lines[-1][:300]}" if lines else "")
                log.warning(
                    "no spot plan is built for %.0f s, so its jobs are decided without a model: %s", PAUSE_S, why
                )
            except asyncio.CancelledError:
                await self._end_process()  # its answer would be read as that of the next key
                raise

    async def _packed(self, key: SpotPlanKey) -> bytes:
        """Return the table of a key. A process that ended, for example out of memory, is replaced once."""
        try:
            return await self._plan_bytes(key)
        except (OSError, EOFError):
            await self._end_process()
            return await self._plan_bytes(key)

    async def _plan_bytes(self, key: SpotPlanKey) -> bytes:
        if self._process is not None and self._process.returncode is not None:
            await self._end_process()
        process = self._process or await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asdict(key)).encode() + b"\n")
        await process.stdin.drain()
        (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        return await process.stdout.readexactly(length)

    async def _start(self) -> asyncio.subprocess.Process:
        self._stderr = b""
        self._process = await start_child(self._command, stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
        assert self._process.stderr is not None
        self._reader = asyncio.create_task(self._log_stderr(self._process.stderr), name="spot plan errors")
        return self._process

    async def _log_stderr(self, stderr: asyncio.StreamReader) -> None:
        while piece := await stderr.read(STDERR_BYTES):
            self._stderr = (self._stderr + piece)[-STDERR_BYTES:]

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await asyncio.shield(process.wait())
        if self._reader is not None:
            await asyncio.wait((self._reader,), timeout=1.0)
            self._reader.cancel()


class _PlannerRound:
    """Plans that are ready, and the waits for the others, which end `wait_s` after the round's first one."""

    def __init__(self, planner: SpotPlanner, *, has_fallback: bool) -> None:
        self._planner = planner
        self._has_fallback = has_fallback
        self._ready: dict[SpotPlanKey, SpotPlan] = {}
        """Plans of this round, which the cache may drop meanwhile."""
        self._given_up: set[SpotPlanKey] = set()
        self._until: float | None = None

    def __call__(self, key: SpotPlanKey) -> SpotPlan | None:
        plan = self._ready.get(key) or self._planner.cache.find(key)
        if plan is None and (key not in self._given_up or not self._has_fallback):
            raise PlanNotReady(key)
        if plan is not None:
            self._ready[key] = plan
        return plan

    async def settle(self, decide: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await decide()
            except PlanNotReady as missing:
                if missing.key in self._given_up:
                    raise
                await self._wait(missing.key)

    async def _wait(self, key: SpotPlanKey) -> None:
        """Wait for a plan, and give it up if it is not built in time."""
        now = asyncio.get_running_loop().time()
        self._until = self._until or now + self._planner.wait_s
        if (build := self._planner.request(key)) is not None:
            await asyncio.wait((build,), timeout=max(0.0, self._until - now))
        plan = self._planner.cache.find(key)
        if plan is None:
            self._given_up.add(key)
        else:
            self._ready[key] = plan

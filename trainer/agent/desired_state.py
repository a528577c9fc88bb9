"""Watcher of the broker's requests and of the broker's lease."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from pydantic import ValidationError

from trainer.agent.base.prepare import UnusableInput
from trainer.agent.base.state import AgentState
from trainer.agent.dead_man_switch import DeadMan
from trainer.contract import object_keys
from trainer.contract.documents import Desired, Outcome
from trainer.objectstore.objects import Objects, ObjectStoreError


class DesiredStateWatcher:
    """Watcher that reads `desired.json`, the grant and the lease every `poll_s`, and detects outages of the store."""

    def __init__(
        self, objects: Objects, state: AgentState, renew: Callable[[], Awaitable[None]], log: Callable[[str], None]
    ) -> None:
        self._objects, self._state, self._renew, self._log = objects, state, renew, log
        self._desired = Desired(epoch=-1)
        self._deadman = DeadMan(state.limits.deadman_s)

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            try:
                await self.once()
            except ObjectStoreError as e:
                self._deadman.unreadable()
                self._check_outage(str(e))
            await asyncio.sleep(self._state.limits.poll_s)

    async def once(self) -> None:
        """Read each object once. The grant is first, since the other reads may need it. Raises: ObjectStoreError."""
        try:
            await self._renew()
        except UnusableInput as e:
            self._log(f"the renewed grant is ignored: {e}")
        self._follow(await self._objects.read(object_keys.desired(self._state.env.attempt)))
        lease = await self._objects.read(object_keys.BROKER_LEASE)
        self._deadman.observe(lease, time.monotonic())
        if self._deadman.expired:
            stale = round(self._deadman.stale_s)
            self._state.end(Outcome.DEADMAN, f"the broker's lease did not change for {stale} s; saved and stopped")

    def _follow(self, data: bytes | None) -> None:
        if data is None:
            return
        try:
            desired = Desired.model_validate_json(data)
        except ValidationError:
            self._log("desired.json cannot be read; it is ignored")
            return
        if not desired.newer_than(self._desired):
            return
        self._desired = desired
        if desired.want != "run":
            reason = desired.reason or f"the broker asked to {desired.want}"
            self._state.end(Outcome.DRAINED, reason, save=desired.want == "drain")

    def _check_outage(self, error: str) -> None:
        silent_s = time.monotonic() - self._objects.answered_at
        if silent_s > self._state.limits.outage_s:
            self._state.end(Outcome.INFRASTRUCTURE, f"no answer from the blob store for {silent_s:.0f} s: {error}")

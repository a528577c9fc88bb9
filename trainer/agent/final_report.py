"""Final report of an attempt: the last log lines, `final.json` and the last heartbeat."""

import asyncio
import contextlib
import sys
from collections.abc import Callable

from trainer.agent import deliver_results
from trainer.agent.base import prepare
from trainer.agent.base.environment import Environment
from trainer.agent.base.state import AgentState
from trainer.agent.upload.heartbeat import HeartbeatSender, redacted
from trainer.agent.upload.log_shipper import Shipper
from trainer.contract import object_keys
from trainer.contract.documents import Final, Outcome
from trainer.objectstore.objects import Objects, ObjectStoreError

LAST_BEAT_S = 30.0
"""Seconds for which the last heartbeat is retried; the machine's shutdown delay starts after it."""
FOLLOW_BEATS = 3
"""Heartbeat intervals that a failed node waits for the report of node 0, because the failure stops node 0 too."""
FAILED_BY_PEER_BEATS = 9
"""Heartbeat intervals that a node waits if it failed only because another node ended; that node reports the cause."""

REPORTED_BY_NODE_0 = (Outcome.COMPLETED, Outcome.DRAINED, Outcome.DEADMAN)
"""Outcomes that only node 0 reports."""


class FinalReport:
    """Writer of one machine's final report.

    Node 0 reports the outcome. Another node that fails reports too, because node 0 may wait for that node for ever.
    """

    def __init__(
        self, objects: Objects, env: Environment, state: AgentState, *, heartbeats: HeartbeatSender, shipper: Shipper
    ) -> None:
        self._objects, self._env, self._state = objects, env, state
        self._heartbeats, self._shipper = heartbeats, shipper

    async def await_first_machine(self, outcome: Outcome, message: str, log: Callable[[str], None]) -> None:
        """Keep a successful node other than 0 alive until `final.json` exists.

        This machine shuts down soon after its agent ends, but node 0 may still save and deliver for a long time. The
        limits are the longest delivery, and the remaining time once the attempt must end.
        """
        if self._env.node == 0 or outcome not in REPORTED_BY_NODE_0:
            return
        log(f"{outcome} here; the first machine reports how the attempt ended")
        self._state.phase, self._state.message = "done", message
        self._heartbeats.now()
        with contextlib.suppress(TimeoutError):
            async with self._state.in_time(deliver_results.LIMIT_S):
                while not await self._is_written():  # noqa: ASYNC110
                    await asyncio.sleep(self._state.limits.heartbeat_s)

    async def _is_written(self) -> bool:
        """Return True if `final.json` exists; False if it is absent or the store cannot be read."""
        with contextlib.suppress(ObjectStoreError):
            return await self._objects.read(object_keys.final(self._env.attempt)) is not None
        return False

    async def write(self, outcome: Outcome, message: str, code: int | None, *, failed_by_peer: bool) -> Outcome:
        """Ship the log, write `final.json`, and send the last heartbeat.

        `failed_by_peer`: this machine failed only because a process of another machine ended.
        """
        retry_for_s = max(30.0, self._state.drain_left_s)
        final = self._final(outcome, message, code)
        try:
            await prepare.retry_while_unreachable(self._shipper.flush, retry_for_s)
            if await self._must_write(outcome, failed_by_peer):
                sent, received = self._objects.sent_bytes, self._objects.received_bytes
                final = final.model_copy(update={"sent_bytes": sent, "received_bytes": received})
                data = final.model_dump_json().encode()
                await prepare.retry_while_unreachable(
                    lambda: self._objects.create(object_keys.final(self._env.attempt), data), retry_for_s
                )
        except ObjectStoreError as e:
            print(f"final.json cannot be written: {e}", file=sys.stderr)
            return Outcome.INFRASTRUCTURE
        self._state.phase, self._state.message = "done", message
        with contextlib.suppress(ObjectStoreError):  # once heartbeats stop, the broker looks for final.json anyway
            await prepare.retry_while_unreachable(self._heartbeats.send, LAST_BEAT_S)
        return outcome

    def _final(self, outcome: Outcome, message: str, code: int | None) -> Final:
        status = self._state.status()
        return Final(
            attempt=self._env.attempt,
            outcome=outcome,
            message=message,
            exit_code=code,
            ran_out=self._state.ran_out,
            bad_host=self._state.bad_host,
            step=status.step,
            total_steps=status.total_steps,
            resumed_from=self._state.resumed_from,
            checkpoint=self._state.checkpoint,
            heldout_loss_before=status.heldout_loss_before,
            heldout_loss_after=status.heldout_loss_after,
            peak_memory_bytes=status.peak_memory_bytes,
            tokens_per_s=status.tokens_per_s,
            messages=redacted(self._state.messages(), self._heartbeats.redact),
            boot=self._state.boot,
        )

    async def _must_write(self, outcome: Outcome, failed_by_peer: bool) -> bool:
        """Return True if this node writes `final.json`.

        A node that failed only through another node waits longest, so that the node with the cause writes
        first.
        """
        if self._env.node == 0 and not failed_by_peer:
            return True
        if outcome in REPORTED_BY_NODE_0:
            return False
        self._state.phase = "saving"
        await asyncio.sleep((FAILED_BY_PEER_BEATS if failed_by_peer else FOLLOW_BEATS) * self._state.limits.heartbeat_s)
        return await self._objects.read(object_keys.final(self._env.attempt)) is None

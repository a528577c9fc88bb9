"""The last log lines, `final.json`, the last beat: how an attempt ended, said once."""

import asyncio
import contextlib
import sys
from collections.abc import Callable

from trainer.agent import deliver_results as deliver
from trainer.agent.base import prepare
from trainer.agent.base.environment import Environment
from trainer.agent.base.state import AgentState
from trainer.agent.upload.heartbeat import Beater, redacted
from trainer.agent.upload.log_shipper import Shipper
from trainer.contract import object_keys as keys
from trainer.contract.documents import Final, Outcome
from trainer.objectstore.objects import Objects, ObjectStoreError

LAST_BEAT_S = 30.0
"""How long the last beat is tried: the machine's own end counts from after it."""
FOLLOW_BEATS = 3
"""How many beats another node's failure waits for node 0's word: the first to fall pulls the others down."""
PULLED_BEATS = 9
"""The same for a node that saw only that another one has gone: the launcher and the other's own wait come before."""

WELL = (Outcome.COMPLETED, Outcome.DRAINED, Outcome.DEADMAN)
"""Of these another node says nothing: how the attempt ended is node 0's to know."""


class FinalReport:
    """Of one machine. Node 0 says how the attempt ended. Another one that fails says so too, since node 0 may wait for
    it for ever.
    """

    def __init__(
        self, objects: Objects, env: Environment, state: AgentState, *, beater: Beater, shipper: Shipper
    ) -> None:
        self._objects, self._env, self._state = objects, env, state
        self._beater, self._shipper = beater, shipper

    async def hear(self, outcome: Outcome, message: str, say: Callable[[str], None]) -> None:
        """Of another node that came to a good end: beats on until the attempt's word is said. Node 0 may still save and
        deliver for long, and a machine ends itself some time after its agent.

        No longer than a delivery may take, and than the attempt has once it is to end.
        """
        if self._env.node == 0 or outcome not in WELL:
            return
        say(f"{outcome} here; how the attempt ended is for the first machine to say")
        self._state.phase, self._state.message = "done", message
        self._beater.now()
        with contextlib.suppress(TimeoutError):
            async with self._state.in_time(deliver.LIMIT_S):
                while not await self._said():  # noqa: ASYNC110
                    await asyncio.sleep(self._state.limits.heartbeat_s)

    async def _said(self) -> bool:
        """False also where the store cannot tell."""
        with contextlib.suppress(ObjectStoreError):
            return await self._objects.read(keys.final(self._env.attempt)) is not None
        return False

    async def speak(self, outcome: Outcome, message: str, code: int | None, *, pulled: bool) -> Outcome:
        """`pulled`: this machine failed only since a process of another one has gone."""
        patience_s = max(30.0, self._state.drain_left_s)
        final = self._final(outcome, message, code)
        try:
            await prepare.insist(self._shipper.flush, patience_s)
            if await self._speaks(outcome, pulled):
                sent, received = self._objects.sent_bytes, self._objects.received_bytes
                final = final.model_copy(update={"sent_bytes": sent, "received_bytes": received})
                data = final.model_dump_json().encode()
                await prepare.insist(lambda: self._objects.create(keys.final(self._env.attempt), data), patience_s)
        except ObjectStoreError as e:
            print(f"final.json cannot be written: {e}", file=sys.stderr)
            return Outcome.INFRASTRUCTURE
        self._state.phase, self._state.message = "done", message
        with contextlib.suppress(ObjectStoreError):  # the broker looks for it in time, since there are no more beats
            await prepare.insist(self._beater.send, LAST_BEAT_S)
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
            messages=redacted(self._state.told(), self._beater.redact),
            boot=self._state.boot,
        )

    async def _speaks(self, outcome: Outcome, pulled: bool) -> bool:
        """Whether this node writes `final.json`. Who was only pulled down waits longest for the one that knows why."""
        if self._env.node == 0 and not pulled:
            return True
        if outcome in WELL:
            return False
        self._state.phase = "saving"
        await asyncio.sleep((PULLED_BEATS if pulled else FOLLOW_BEATS) * self._state.limits.heartbeat_s)
        return await self._objects.read(keys.final(self._env.attempt)) is None

"""What the agent's tasks share about one attempt."""

import asyncio
import contextlib
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Literal

from pydantic import ValidationError

from trainer.agent.base.background import background
from trainer.agent.base.environment import Environment
from trainer.agent.base.gpus import GpuUsage
from trainer.contract.documents import (
    MAX_MESSAGES,
    AgentMessage,
    AttemptSpec,
    CheckpointRef,
    Heartbeat,
    Limits,
    Outcome,
    Phase,
)
from trainer.core.ipc import RunFolder, Status

MESSAGE = 500
"""Characters of what people are told."""
AT_ONCE = 5
"""Of a kind, told whenever they come; then after pauses: the broker hears only the first hundred things of a start."""
TRIES = ("upload_waits", "save_failed")
"""Kinds that each failed try of the same thing brings once more: the first is told at once."""
PAUSE_S = 60.0
"""The first pause; each is twice the one before."""
LOOK_S = 0.1
LAST_WORDS_S = 5.0
"""What a notice must leave for `final.json` after the last checkpoint, at the most."""
LAST_WORDS = 0.2
"""Of a short notice, this share."""


@dataclass(kw_only=True)
class Ending:
    """Why the attempt is to end before its work is done."""

    outcome: Outcome
    reason: str
    save: bool
    """A last checkpoint is taken."""
    finish: bool = False
    """None is taken, and what is whole on this disk is still sent."""
    asked_at: float

    @property
    def saves(self) -> bool:
        """False: end at once."""
        return self.save or self.finish

    def withdraw(self) -> None:
        """The last checkpoint, also one that is being sent."""
        self.save = self.finish = False


@dataclass(kw_only=True)
class AgentState:
    """Written by one task each, read by all; one event loop, so no locks."""

    env: Environment
    run: RunFolder
    boot: str = field(default_factory=lambda: secrets.token_hex(4))
    began: float = field(default_factory=time.time)
    """Unix seconds."""
    spec: AttemptSpec | None = None
    limits: Limits = field(default_factory=Limits)
    phase: Phase | None = "starting"
    """The agent's own phase; None while the worker's counts."""
    message: str = ""
    resumed_from: int | None = None
    checkpoint: CheckpointRef | None = None
    bad_host: bool = False
    """This machine was looked at and found unfit."""
    complete: str | None = None
    """Manifest of the checkpoint that holds the results, once it is committed."""
    clock: Callable[[], float] = time.monotonic
    _told: list[AgentMessage] = field(default_factory=list)
    _silent_until: dict[str, float] = field(default_factory=dict)
    """By kind, on the clock."""
    _lines: int = 0
    """Of what the worker has to tell, those taken over."""
    ran_out: Literal["device", "host"] | None = None
    """Whose memory, once it has."""
    ending: Ending | None = None
    gone_at: float | None = None
    """Monotonic seconds at which the cloud takes this machine away, once it has said so."""
    final_report_s: float = LAST_WORDS_S
    """Of the notice, for the last words."""
    ending_asked: asyncio.Event = field(default_factory=asyncio.Event)
    _status: Status = field(default_factory=Status)

    def end(self, outcome: Outcome, reason: str, *, save: bool = True) -> None:
        """Asks for the end. The first request counts; a later one may only withdraw the last checkpoint."""
        if self.ending is None:
            self.ending = Ending(outcome=outcome, reason=reason, save=save, asked_at=time.monotonic())
        elif not save:
            self.ending.withdraw()
        self.ending_asked.set()

    def notice(self, left_s: float) -> None:
        """The cloud takes this machine away in so many seconds."""
        self.gone_at, self.final_report_s = time.monotonic() + left_s, min(LAST_WORDS_S, LAST_WORDS * left_s)

    def choose_final_save(self, save_s: float | None, finish_s: float | None) -> None:
        """Begins no last checkpoint where a notice leaves less time than one takes: what is under way is sent to its
        end if there is time for that, and else the latest one is better trusted than a save that is cut off.

        `save_s`: seconds that a save takes. `finish_s`: those that what is whole on this disk takes to be sent. None:
        nobody knows, or nothing is there.
        """
        ending, latest, left_s = self.ending, self.checkpoint, max(0.0, self.drain_left_s)
        if ending is None or not ending.save or self.gone_at is None or save_s is None or save_s <= left_s:
            return
        why = f"a save takes {save_s:.1f} s and {left_s:.1f} s are left"
        if finish_s is not None and finish_s <= left_s:
            ending.save, ending.finish = False, True
            ending.reason += f"; what is whole is sent, and no other checkpoint is taken: {why}"
        elif latest is not None:
            ending.save = False
            ending.reason += f"; the checkpoint of step {latest.step} counts: {why}"

    @property
    def notice_s(self) -> float | None:
        """Seconds until the machine is taken away; None while nothing is known of that."""
        return None if self.gone_at is None else max(0.0, self.gone_at - time.monotonic())

    @property
    def drain_left_s(self) -> float:
        """Seconds until the end must be over; the store's patience while nobody asked for the end."""
        if self.ending is None:
            return self.limits.outage_s
        if not self.ending.saves:
            return 0.0
        left_s = self.ending.asked_at + self.limits.drain_s - time.monotonic()
        return left_s if self.notice_s is None else min(left_s, self.notice_s - self.final_report_s)

    @contextlib.asynccontextmanager
    async def in_time(self, most_s: float | None = None) -> AsyncIterator[None]:
        """The body ends with a TimeoutError after `most_s`, or earlier, as the attempt has to. None: only then."""
        async with asyncio.timeout(most_s) as limit, background(self._hasten(limit)):
            yield

    async def _hasten(self, limit: asyncio.Timeout) -> None:
        """A notice may come at any time, also after the end was asked for."""
        loop, latest = asyncio.get_running_loop(), limit.when() or math.inf
        while not limit.expired():  # one that has expired cannot be moved any more
            if self.ending is not None:
                limit.reschedule(min(latest, loop.time() + self.drain_left_s))
            await asyncio.sleep(LOOK_S)

    def status(self) -> Status:
        """The worker's latest status; the last good one when it cannot be read."""
        with contextlib.suppress(OSError, ValidationError):
            self._status = Status.model_validate_json(self.run.status.read_bytes())
        return self._status

    def tell(self, kind: str, message: str) -> None:
        """People should hear of it; `kind` as in `Told`. What comes over and over is told after pauses that double."""
        now, before = self.clock(), sum(one.kind == kind for one in self._told)
        if now < self._silent_until.get(kind, -math.inf):
            return
        paused = before + 1 - (1 if kind in TRIES else AT_ONCE)
        if paused >= 0:
            self._silent_until[kind] = now + PAUSE_S * 2**paused
        self._told.append(AgentMessage(seq=len(self._told) + 1, kind=kind, message=message[:MESSAGE]))

    def told(self) -> tuple[AgentMessage, ...]:
        """The latest ones, the worker's among them."""
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines = self.run.told.read_text(errors="replace").split("\n")[:-1]
        for line in lines[self._lines :]:
            with contextlib.suppress(ValueError, TypeError):
                kind, message = json.loads(line)
                self.tell(kind, message)
        self._lines = max(self._lines, len(lines))
        return tuple(self._told[-MAX_MESSAGES:])

    def beat(self, seq: int, load: GpuUsage | None) -> Heartbeat:
        """The sign of life number `seq`."""
        status = self.status()
        return Heartbeat(
            attempt=self.env.attempt,
            node=self.env.node,
            boot=self.boot,
            seq=seq,
            phase=self.phase or status.phase,
            message=self.message or status.message,
            step=status.step,
            total_steps=status.total_steps,
            resumed_from=self.resumed_from,
            loss=status.loss,
            heldout_loss=status.heldout_loss,
            tokens_per_s=status.tokens_per_s,
            rows_per_s=status.rows_per_s,
            peak_memory_bytes=status.peak_memory_bytes,
            gpu_utilisation=load and load.utilisation,
            gpu_memory_bytes=load and load.memory_bytes,
            gpu_power_w=load and load.power_w,
            checkpoint=self.checkpoint,
            notice_s=self.notice_s,
            messages=self.told(),
        )

"""State of one attempt, shared by the agent's tasks."""

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
"""Largest number of characters of a message."""
AT_ONCE = 5
"""Messages of one kind before the first pause. A pause drops further messages of the kind, because the broker stores
only 100 messages per start of an agent.
"""
TRIES = ("upload_waits", "save_failed")
"""Kinds of messages that each failed try of an action repeats; their pauses begin after the first message."""
PAUSE_S = 60.0
"""Seconds of the first pause; each pause doubles the previous one."""
POLL_S = 0.1
"""Seconds between two checks of whether the attempt must end."""
FINAL_REPORT_S = 5.0
"""Maximum seconds of a notice reserved for `final.json` after the last checkpoint."""
FINAL_REPORT_SHARE = 0.2
"""Share of a short notice reserved for `final.json`."""


@dataclass(kw_only=True)
class Ending:
    """Reason why the attempt must end before its work is done."""

    outcome: Outcome
    reason: str
    save: bool
    """True: a last checkpoint is taken."""
    finish: bool = False
    """True: no new checkpoint is taken, but complete snapshots on this disk are still sent."""
    asked_at: float

    @property
    def saves(self) -> bool:
        """False if the attempt must end at once."""
        return self.save or self.finish

    def withdraw(self) -> None:
        """Cancel the last checkpoint, even while it is being sent."""
        self.save = self.finish = False


@dataclass(kw_only=True)
class AgentState:
    """State shared by the agent's tasks. Each part has one writing task; one event loop needs no locks."""

    env: Environment
    run: RunFolder
    boot: str = field(default_factory=lambda: secrets.token_hex(4))
    began: float = field(default_factory=time.time)
    """Start of the agent in Unix seconds."""
    spec: AttemptSpec | None = None
    limits: Limits = field(default_factory=Limits)
    phase: Phase | None = "starting"
    """Phase of the agent; None while the worker's phase counts."""
    message: str = ""
    resumed_from: int | None = None
    checkpoint: CheckpointRef | None = None
    bad_host: bool = False
    """True if the host check found this machine unfit."""
    complete: str | None = None
    """Manifest of the checkpoint with the results, once it is committed; None before."""
    clock: Callable[[], float] = time.monotonic
    _messages: list[AgentMessage] = field(default_factory=list)
    _silent_until: dict[str, float] = field(default_factory=dict)
    """Time on the clock until which messages of a kind are suppressed."""
    _lines: int = 0
    """Number of the worker's messages read so far."""
    ran_out: Literal["device", "host"] | None = None
    """Memory that ran out; None: neither."""
    ending: Ending | None = None
    gone_at: float | None = None
    """Monotonic time in seconds at which the cloud preempts this machine; None: no notice."""
    final_report_s: float = FINAL_REPORT_S
    """Seconds of the notice reserved for the final report."""
    ending_asked: asyncio.Event = field(default_factory=asyncio.Event)
    _status: Status = field(default_factory=Status)

    def end(self, outcome: Outcome, reason: str, *, save: bool = True) -> None:
        """Request the end. The first request counts; a later one can only cancel the last checkpoint."""
        if self.ending is None:
            self.ending = Ending(outcome=outcome, reason=reason, save=save, asked_at=time.monotonic())
        elif not save:
            self.ending.withdraw()
        self.ending_asked.set()

    def notice(self, left_s: float) -> None:
        """Record that the cloud preempts this machine in `left_s` seconds."""
        self.gone_at, self.final_report_s = time.monotonic() + left_s, min(FINAL_REPORT_S, FINAL_REPORT_SHARE * left_s)

    def choose_final_save(self, save_s: float | None, finish_s: float | None) -> None:
        """Cancel the last checkpoint if the notice leaves less time than a save takes.

        A snapshot that can be sent in time is still sent. Otherwise the latest committed checkpoint counts,
        since a save that is cut off is useless. `save_s`: seconds of a save. `finish_s`: seconds to send the
        complete snapshot on this disk. None: unknown, or no snapshot exists.
        """
        ending, latest, left_s = self.ending, self.checkpoint, max(0.0, self.drain_left_s)
        if ending is None or not ending.save or self.gone_at is None or save_s is None or save_s <= left_s:
            return
        why = f"a save takes {save_s:.1f} s and {left_s:.1f} s are left"
        if finish_s is not None and finish_s <= left_s:
            ending.save, ending.finish = False, True
            ending.reason += f"; the complete snapshot is sent, and no other checkpoint is taken: {why}"
        elif latest is not None:
            ending.save = False
            ending.reason += f"; the checkpoint of step {latest.step} counts: {why}"

    @property
    def notice_s(self) -> float | None:
        """Seconds until the machine is preempted; None without a notice."""
        return None if self.gone_at is None else max(0.0, self.gone_at - time.monotonic())

    @property
    def drain_left_s(self) -> float:
        """Seconds until the attempt must have ended; the outage limit while no end is requested."""
        if self.ending is None:
            return self.limits.outage_s
        if not self.ending.saves:
            return 0.0
        left_s = self.ending.asked_at + self.limits.drain_s - time.monotonic()
        return left_s if self.notice_s is None else min(left_s, self.notice_s - self.final_report_s)

    @contextlib.asynccontextmanager
    async def in_time(self, max_s: float | None = None) -> AsyncIterator[None]:
        """Raise TimeoutError in the caller's block after `max_s` seconds, or when the attempt must end.

        `max_s` None: only the attempt's end limits the block.
        """
        async with asyncio.timeout(max_s) as limit, background(self._shorten_limit(limit)):
            yield

    async def _shorten_limit(self, limit: asyncio.Timeout) -> None:
        """Shorten the limit once the attempt must end. A later preemption notice may shorten it further."""
        loop, latest = asyncio.get_running_loop(), limit.when() or math.inf
        while not limit.expired():  # an expired limit cannot be moved
            if self.ending is not None:
                limit.reschedule(min(latest, loop.time() + self.drain_left_s))
            await asyncio.sleep(POLL_S)

    def status(self) -> Status:
        """Return the worker's latest status, or the last readable one."""
        with contextlib.suppress(OSError, ValidationError):
            self._status = Status.model_validate_json(self.run.status.read_bytes())
        return self._status

    def add_message(self, kind: str, message: str) -> None:
        """Add a message for the user, unless messages of its `kind` are paused; each pause doubles the previous one.

        `kind`: as in `AgentMessage`.
        """
        now, before = self.clock(), sum(earlier.kind == kind for earlier in self._messages)
        if now < self._silent_until.get(kind, -math.inf):
            return
        paused = before + 1 - (1 if kind in TRIES else AT_ONCE)
        if paused >= 0:
            self._silent_until[kind] = now + PAUSE_S * 2**paused
        self._messages.append(AgentMessage(seq=len(self._messages) + 1, kind=kind, message=message[:MESSAGE]))

    def messages(self) -> tuple[AgentMessage, ...]:
        """Return the latest messages, including the worker's."""
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines = self.run.messages_file.read_text(errors="replace").split("\n")[:-1]
        for line in lines[self._lines :]:
            with contextlib.suppress(ValueError, TypeError):
                kind, message = json.loads(line)
                self.add_message(kind, message)
        self._lines = max(self._lines, len(lines))
        return tuple(self._messages[-MAX_MESSAGES:])

    def beat(self, seq: int, load: GpuUsage | None) -> Heartbeat:
        """Return heartbeat number `seq`."""
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
            messages=self.messages(),
        )

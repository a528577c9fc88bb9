"""Sends heartbeats from the agent's start, also while the worker imports, saves or hangs."""

import asyncio
import contextlib
import threading

import psutil

from trainer.agent.base import gpus
from trainer.agent.base.state import AgentState
from trainer.agent.upload.log_buffer import Redactor
from trainer.contract import object_keys
from trainer.contract.documents import AgentMessage
from trainer.objectstore.objects import Objects, ObjectStoreError

DRIVER_S = 3.0
"""Seconds that a heartbeat waits for the driver."""


class HeartbeatSender:
    """Writer of `heartbeats/<attempt>/<node>` at a fixed interval."""

    def __init__(self, objects: Objects, state: AgentState) -> None:
        self._objects, self._state = objects, state
        self._seq = 0
        self._hurry = asyncio.Event()
        self._asking: threading.Thread | None = None
        self.redact = Redactor({})

    async def run(self) -> None:
        """Send a heartbeat every `heartbeat_s` until cancelled."""
        while True:
            await self.once()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._state.limits.heartbeat_s):
                    await self._hurry.wait()
            self._hurry.clear()

    def now(self) -> None:
        """Send the next heartbeat at once, because the broker or other machines wait for the change."""
        self._hurry.set()

    async def once(self) -> None:
        """Send a heartbeat; if the store is unreachable, the next heartbeat tries again."""
        with contextlib.suppress(ObjectStoreError):
            await self.send()

    async def send(self) -> None:
        """Send a heartbeat. Raises: ObjectStoreError."""
        self._seq += 1
        beat = self._state.beat(self._seq, await self._load())
        changes = {
            "message": self.redact(beat.message),
            "messages": redacted(beat.messages, self.redact),
            "sent_bytes": self._objects.sent_bytes,
            "received_bytes": self._objects.received_bytes,
            "network_bytes": _network_bytes(),
        }
        beat = beat.model_copy(update=changes)
        await self._objects.write(object_keys.heartbeat(beat.attempt, beat.node), beat.model_dump_json().encode())

    async def _load(self) -> gpus.GpuUsage | None:
        """Return the use of this node's GPUs; None without GPUs, or while the driver hangs."""
        spec = self._state.spec
        if spec is None or spec.world.gpus_per_node == 0 or (self._asking and self._asking.is_alive()):
            return None
        usages: list[gpus.GpuUsage | None] = []
        load_read = asyncio.Event()
        loop = asyncio.get_running_loop()

        def ask() -> None:
            usages.append(gpus.load())
            with contextlib.suppress(RuntimeError):  # the agent has ended
                loop.call_soon_threadsafe(load_read.set)

        # The event loop waits for its own threads at exit, so a hung driver call gets a separate thread.
        self._asking = threading.Thread(target=ask, daemon=True)
        self._asking.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRIVER_S):
                await load_read.wait()
        return usages[0] if usages else None


def redacted(messages: tuple[AgentMessage, ...], redact: Redactor) -> tuple[AgentMessage, ...]:
    """Return the messages with the values of secrets redacted."""
    return tuple(m.model_copy(update={"message": redact(m.message)}) for m in messages)


def _network_bytes() -> int | None:
    """Return bytes received by this machine or container, except loopback; None if not available."""
    try:
        counters = psutil.net_io_counters(pernic=True)
    except OSError:
        return None
    return sum(count.bytes_recv for name, count in counters.items() if name != "lo")

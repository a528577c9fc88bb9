"""Upload of new log lines in chunks of up to 256 KiB, every `log_s` seconds or as soon as a chunk is full."""

import asyncio
import time

from trainer.agent.base.environment import Environment
from trainer.agent.base.state import AgentState
from trainer.agent.upload.log_buffer import LogBuffer
from trainer.contract import object_keys
from trainer.objectstore.objects import Objects, ObjectStoreError

POLL_S = 0.2


class Shipper:
    """Shipper of one chunk at a time; a failed chunk keeps its number and is sent again."""

    def __init__(self, objects: Objects, log: LogBuffer, env: Environment, state: AgentState) -> None:
        self._objects, self._log, self._env, self._state = objects, log, env, state
        self._number = 0
        self._pending = b""
        self._busy = asyncio.Lock()

    async def run(self) -> None:
        """Ship until cancelled."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(POLL_S)
            if not self._log.full and time.monotonic() - last < self._state.limits.log_s:
                continue
            try:
                await self._ship_chunk()
            except ObjectStoreError:
                await asyncio.sleep(self._state.limits.log_s)
            last = time.monotonic()

    async def flush(self) -> None:
        """Ship everything that is left, at the end. Raises: ObjectStoreError."""
        self._log.close()
        while await self._ship_chunk():
            pass

    async def _ship_chunk(self) -> bool:
        async with self._busy:
            self._pending = self._pending or self._log.chunk()
            if not self._pending:
                return False
            key = object_keys.log_chunk(self._env.attempt, self._env.node, self._state.boot, self._number)
            await self._objects.write(key, self._pending)
            self._number += 1
            self._pending = b""
            return True

"""Hints from other processes: LISTEN on a separate connection, which is opened again after a loss."""

import asyncio
import logging

import asyncpg

from broker.store.hints import Hints
from broker.store.postgres.pool import CONNECT_TIMEOUT_S

log = logging.getLogger(__name__)

CHANNEL = "gpubroker"
RETRY_S = (0.1, 5.0)


class Listener:
    """Implementation of `Store.wait`; connects at the first wait."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._hints = Hints()
        self._task: asyncio.Task[None] | None = None

    async def wait(self, topic: str, timeout_s: float) -> bool:
        """Return True if `topic` is hinted within the timeout, or if hints may have been missed."""
        if self._task is None:
            self._task = asyncio.create_task(self._listen(), name="store-hints")
        return await self._hints.wait(topic, timeout_s)

    async def _listen(self) -> None:
        delay = RETRY_S[0]
        while True:
            try:
                connection = await asyncpg.connect(self._dsn, timeout=CONNECT_TIMEOUT_S)
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                log.debug("no hints until the database is back: %s", error)
                await asyncio.sleep(delay)
                delay = min(2 * delay, RETRY_S[1])
                continue
            delay = RETRY_S[0]
            try:
                await self._receive(connection)
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                log.debug("the connection for hints was lost: %s", error)
            finally:
                connection.terminate()

    async def _receive(self, connection: "asyncpg.Connection[asyncpg.Record]") -> None:
        lost_event = asyncio.Event()
        connection.add_termination_listener(lambda _: lost_event.set())
        await connection.add_listener(CHANNEL, self._received)
        self._hints.hint_all()  # hints before this moment were missed
        await lost_event.wait()

    def _received(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        for topic in str(payload).split():
            self._hints.hint(topic)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

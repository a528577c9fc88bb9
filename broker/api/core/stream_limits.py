"""Limits of connections and open streams (followers, transfers, shells) of HTTP and gRPC.

A stream ends when its token expires or is deleted.
"""

import asyncio
import logging
import resource
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from broker.api.core.auth import Authenticator, Caller, Credential, Unauthenticated
from broker.api.core.problems import TooMany
from broker.api.core.request_slots import RequestSlots
from broker.domain.errors import StoreUnavailable
from broker.ports import Clock

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
"""Connections of one port that may be open at once."""

ANSWER_S = 5.0
"""Seconds to wait for the database. Without an answer, a stream may continue until its token's known expiry."""


@dataclass(frozen=True, kw_only=True)
class StreamLimits:
    """Maximum numbers of open streams."""

    per_token: int = 100
    per_team: int = 250
    total: int = 500
    recheck_s: float = 2.0
    """Seconds between two checks of an open stream's token."""


class Streams:
    """Counts the open streams of HTTP and gRPC together."""

    def __init__(self, auth: Authenticator, clock: Clock, limits: StreamLimits) -> None:
        self._auth = auth
        self._clock = clock
        self._limits = limits
        self._open: Counter[str] = Counter()
        self._teams: Counter[str] = Counter()
        self.requests = RequestSlots()
        """Limits of all other requests, of HTTP and gRPC together."""

    @property
    def open(self) -> int:
        """Number of open streams of all tokens."""
        return self._open.total()

    @asynccontextmanager
    async def slot(self, caller: Caller, authorization: Credential) -> AsyncIterator[None]:
        """Run a stream in the body of the `with` statement. Raises TooMany before the body.

        Soon after the token expired or was deleted, the body is cancelled and Unauthenticated is raised.
        """
        self._enter(caller)
        try:
            async with asyncio.timeout(None) as end:
                watch = asyncio.create_task(self._watch(caller, authorization, end))
                try:
                    yield
                finally:
                    watch.cancel()
        except TimeoutError:
            if not end.expired():
                raise
            raise Unauthenticated("this token has ended or was revoked; give another one") from None
        finally:
            self._open -= Counter({caller.token_id: 1})
            self._teams -= Counter({caller.team: 1})

    def _enter(self, caller: Caller) -> None:
        most = self._limits
        if self._open[caller.token_id] >= most.per_token:
            raise TooMany(f"this token has as many streams open as it may, {most.per_token}; end one of them")
        if self._teams[caller.team] >= most.per_team:
            raise TooMany(f"this team has as many streams open as it may, {most.per_team}; end one of them")
        if self.open >= most.total:
            raise TooMany(f"as many streams are open as may be, {most.total}; try again when one has ended")
        self._open[caller.token_id] += 1
        self._teams[caller.team] += 1

    async def _watch(self, caller: Caller, authorization: Credential, end: asyncio.Timeout) -> None:
        try:
            await self._until_over(caller, authorization)
        except Exception:
            log.exception("watching a token failed; its stream is cut, because no stream may run unwatched")
        end.reschedule(asyncio.get_running_loop().time())

    async def _until_over(self, caller: Caller, authorization: Credential) -> None:
        """Return when the token is invalid.

        While the database does not answer, keep waiting, but return at the token's known expiry.
        """
        while (left_s := self._left_s(caller)) > 0:
            await self._clock.sleep(min(left_s, self._limits.recheck_s))
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._auth.recheck(authorization)
            except (StoreUnavailable, TimeoutError):
                continue
            except Unauthenticated:
                return

    def _left_s(self, caller: Caller) -> float:
        if caller.expires_at is None:
            return float("inf")
        return (caller.expires_at - self._clock.now()).total_seconds()


def bounded_connections(requested: int = MAX_CONNECTIONS) -> int:
    """Return the number of connections to allow: at most a third of the files that this process may open.

    Otherwise callers could use up the descriptors that the broker needs for its database and its clouds.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return requested if soft == resource.RLIM_INFINITY else min(requested, soft // 3)


def abort(request: web.Request) -> None:
    """Drop the connection, so that the reader sees that the answer is incomplete."""
    if request.transport is not None:
        request.transport.abort()

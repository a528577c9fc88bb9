"""`GET /v1/jobs/{job_id}/shell`: runs a program next to a job's agent.

The daemon connects, so that no key leaves it.
"""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import WSCloseCode, web

from broker.api.core.auth import Caller, Forbidden, Unauthenticated
from broker.api.core.problems import Conflict, NotFound, TooMany
from broker.api.core.stream_limits import abort
from broker.api.http import terminal
from broker.api.http.context import AUTH, SERVICE, STREAMS
from broker.domain.errors import InvalidInput, Problem
from broker.domain.ids import JobId
from broker.domain.job import AttemptState

log = logging.getLogger(__name__)
PATH = "/v1/jobs/{job_id}/shell"
REACHABLE = frozenset({AttemptState.BOOTING, AttemptState.TRAINING, AttemptState.DRAINING, AttemptState.TERMINATING})
WORDS, WORD_CHARACTERS = 256, 8192
CLOSE_S = 12.0
"""Seconds that a client may take to receive the end of its shell."""
SHELLS_OF_ONE, SHELLS = 8, 32
"""Maximum number of open shells, per owner and in all. Each is an ssh process of this host."""


class Shells:
    """Counts open shells."""

    def __init__(self) -> None:
        self._open: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def slot(self, caller: Caller) -> Iterator[None]:
        """Count a shell during the body. Raises TooMany."""
        owner = caller.team, caller.owner
        if self._open[owner] >= SHELLS_OF_ONE:
            raise TooMany(f"{caller.owner} has {SHELLS_OF_ONE} shells open, which is the most; end one of them")
        if self._open.total() >= SHELLS:
            raise TooMany(f"this daemon has {SHELLS} shells open, which is the most; try again when one has ended")
        self._open[owner] += 1
        try:
            yield
        finally:
            self._open -= Counter({owner: 1})


OPEN_SHELLS = web.AppKey("open_shells", Shells)


async def shell(request: web.Request) -> web.WebSocketResponse:
    """Open a shell or run a command.

    Query: repeated `word` is the command; `tty=1` gives it a terminal; see `terminal`.
    """
    caller = await request.app[AUTH].caller(request.headers.get("Authorization"), "submit")
    name, words = request.match_info["job_id"], tuple(request.query.getall("word", ()))
    if not re.fullmatch(r"[a-z2-7]{13}", name):
        raise NotFound("no such job; `gpubroker ls` lists yours")
    if len(words) > WORDS or any(len(word) > WORD_CHARACTERS or "\0" in word for word in words):
        message = f"at most {WORDS} words of {WORD_CHARACTERS} characters; put a longer command into a file"
        raise InvalidInput(Problem(field="word", message=message))
    with request.app[OPEN_SHELLS].slot(caller):
        return await _open(request, caller, JobId(name), words)


async def _open(request: web.Request, caller: Caller, name: JobId, words: tuple[str, ...]) -> web.WebSocketResponse:
    service, tty = request.app[SERVICE], request.query.get("tty") == "1"
    job = await service.job(caller, name)
    if job.owner != caller.owner and not caller.admin:
        raise Forbidden(f"job {job.id} is {job.owner}'s, whose secrets are on its machine; ask {job.owner}")
    attempts = await service.attempts(caller, job)
    latest = attempts[-1] if attempts else None
    if latest is None or latest.state not in REACHABLE or not latest.handles:
        raise Conflict(f"job {job.id} has no machine now; it is {job.state.value}")
    await service.quotes.check_host_shell(caller, latest.handles[0])
    argv = await service.reach(latest.handles[0], words, tty)
    log.info("%s opens %s on %s of job %s", caller.owner, words[:1] or "a shell", latest.name, job.id)
    socket = web.WebSocketResponse(heartbeat=20.0, max_msg_size=4 * 1024**2, compress=False)  # no inflating
    if not socket.can_prepare(request).ok:
        raise InvalidInput(Problem(field="Upgrade", message="this endpoint speaks WebSocket; use `gpubroker exec JOB`"))
    try:
        async with request.app[STREAMS].slot(caller, request.headers.get("Authorization")):
            await socket.prepare(request)
            await terminal.serve(argv, socket, tty=tty)
    except Unauthenticated as error:
        if not socket.prepared:
            raise
        await _close(request, socket, WSCloseCode.POLICY_VIOLATION, str(error))
    else:
        await _close(request, socket, WSCloseCode.OK, "")
    return socket


async def _close(request: web.Request, socket: web.WebSocketResponse, code: int, message: str) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await socket.close(code=code, message=message.encode())
    except TimeoutError:
        abort(request)

"""`Client`: the calls of `AsyncClient`, with the same signatures, as blocking calls."""

import functools
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

from broker.client.async_client import AsyncClient
from broker.client.transport.loop_thread import LoopThread

P = ParamSpec("P")
R = TypeVar("R")
CLOSE_S = 5.0
"""Seconds to wait for the connections to close."""


def _call(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate["Client", P], R]:
    @functools.wraps(method)
    def run(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.wait(method(self.asynchronous, *args, **kwargs))

    return run


def _stream(
    method: Callable[Concatenate[AsyncClient, P], AsyncIterator[R]],
) -> Callable[Concatenate["Client", P], Iterator[R]]:
    @functools.wraps(method)
    def run(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        source = cast("AsyncGenerator[R, None]", method(self.asynchronous, *args, **kwargs))
        try:
            while (item := self.wait(_next(source))) is not None:
                yield item[0]
        finally:
            self.wait(source.aclose())

    return run


def _close(thread: LoopThread, client: AsyncClient) -> None:
    """Disconnect a client that is closed or not referenced any more."""
    thread.stop(client.__aexit__(None, None, None), wait_s=CLOSE_S)


async def _next(source: AsyncGenerator[R, None]) -> tuple[R] | None:
    """Return the next item in a tuple, or None at the end."""
    async for item in source:
        return (item,)
    return None


class Client:
    """Client of one daemon, usable from any thread, and inside a running event loop, as in a notebook.

    `url` None: the daemon that the command line uses. The client connects at its first call, and `with` or `close`
    disconnects it.
    Calls raise the errors of AsyncClient: ApiError for refusals, DaemonUnreachable without an answer.
    """

    def __init__(self, url: str | None = None, token: str | None = None, *, retry_for_s: float = 0.0) -> None:
        self.asynchronous = AsyncClient.found(url, token, retry_for_s=retry_for_s)
        self._opening = threading.Lock()
        self._thread: LoopThread | None = None
        self._closing: weakref.finalize[..., Any] | None = None

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect. A later call raises RuntimeError."""
        self._open()
        if self._closing is not None:
            self._closing()

    def _open(self) -> LoopThread:
        """Return the connected thread, started by the first call."""
        with self._opening:
            if self._thread is None:
                self._thread = LoopThread()
                self._thread.run(self.asynchronous.__aenter__())
                self._closing = weakref.finalize(self, _close, self._thread, self.asynchronous)
            return self._thread

    def wait(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine on the client's own loop and return its result. Ctrl-C cancels the coroutine."""
        return self._open().run(work)

    quote = _call(AsyncClient.quote)
    what_if = _call(AsyncClient.what_if)
    offers = _call(AsyncClient.offers)
    offer_history = _call(AsyncClient.offer_history)
    providers = _call(AsyncClient.providers)
    check_providers = _call(AsyncClient.check_providers)
    submit = _call(AsyncClient.submit)
    job = _call(AsyncClient.job)
    jobs = _call(AsyncClient.jobs)
    cancel = _call(AsyncClient.cancel)
    delete_data = _call(AsyncClient.delete_data)
    retry = _call(AsyncClient.retry)
    raise_cap = _call(AsyncClient.raise_cap)
    job_id = _call(AsyncClient.job_id)
    ledger = _call(AsyncClient.ledger)
    decision = _call(AsyncClient.decision)
    events = _stream(AsyncClient.events)
    events_now = _call(AsyncClient.events_now)
    logs = _stream(AsyncClient.logs)
    log_now = _call(AsyncClient.log_now)
    upload = _call(AsyncClient.upload)
    import_data = _call(AsyncClient.import_data)
    metrics = _call(AsyncClient.metrics)
    artifacts = _call(AsyncClient.artifacts)
    artifact = _call(AsyncClient.artifact)
    download = _call(AsyncClient.download)
    spend = _call(AsyncClient.spend)
    charges = _call(AsyncClient.charges)
    calibration = _call(AsyncClient.calibration)
    secrets = _call(AsyncClient.secrets)
    put_secret = _call(AsyncClient.put_secret)
    delete_secret = _call(AsyncClient.delete_secret)
    sign_in_link = _call(AsyncClient.sign_in_link)
    tokens = _call(AsyncClient.tokens)
    create_token = _call(AsyncClient.create_token)
    delete_token = _call(AsyncClient.delete_token)
    me = _call(AsyncClient.me)
    ready = _call(AsyncClient.ready)
    policies = _call(AsyncClient.policies)
    policy_history = _call(AsyncClient.policy_history)
    apply_policy = _call(AsyncClient.apply_policy)
    dry_run_policy = _call(AsyncClient.dry_run_policy)
    delete_policy = _call(AsyncClient.delete_policy)
    budgets = _call(AsyncClient.budgets)
    approve = _call(AsyncClient.approve)
    refuse = _call(AsyncClient.refuse)
    teams = _call(AsyncClient.teams)
    create_team = _call(AsyncClient.create_team)
    delete_team = _call(AsyncClient.delete_team)
    audit = _call(AsyncClient.audit)
    channels = _call(AsyncClient.channels)
    channel = _call(AsyncClient.channel)
    create_channel = _call(AsyncClient.create_channel)
    change_channel = _call(AsyncClient.change_channel)
    rotate_channel = _call(AsyncClient.rotate_channel)
    delete_channel = _call(AsyncClient.delete_channel)
    test_channel = _call(AsyncClient.test_channel)
    slack_users = _call(AsyncClient.slack_users)
    link_slack_user = _call(AsyncClient.link_slack_user)
    unlink_slack_user = _call(AsyncClient.unlink_slack_user)

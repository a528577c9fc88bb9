"""`Client`: the calls of `AsyncClient`, with the same signatures, for programs without an event loop."""

import asyncio
import functools
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

from broker.client.async_client import AsyncClient

P = ParamSpec("P")
R = TypeVar("R")


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


async def _next(source: AsyncGenerator[R, None]) -> tuple[R] | None:
    """Return the next item in a tuple, or None at the end."""
    async for item in source:
        return (item,)
    return None


class Client:
    """Client of one daemon, for `with`, usable from any thread. `url` None: the daemon that the command line uses.

    Calls raise the errors of AsyncClient: ApiError for refusals, DaemonUnreachable without an answer.
    """

    def __init__(self, url: str | None = None, token: str | None = None, *, patience_s: float = 0.0) -> None:
        self.asynchronous = AsyncClient.found(url, token, patience_s=patience_s)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gpubroker-client", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.wait(self.asynchronous.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wait(self.asynchronous.__aexit__(kind, error, trace))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def wait(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine on the client's own loop and return its result. Ctrl-C cancels the coroutine."""
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("use the client with `with`")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    quote = _call(AsyncClient.quote)
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
    ledger = _call(AsyncClient.ledger)
    decision = _call(AsyncClient.decision)
    events = _stream(AsyncClient.events)
    events_now = _call(AsyncClient.events_now)
    logs = _stream(AsyncClient.logs)
    log_now = _call(AsyncClient.log_now)
    upload = _call(AsyncClient.upload)
    metrics = _call(AsyncClient.metrics)
    artifacts = _call(AsyncClient.artifacts)
    artifact = _call(AsyncClient.artifact)
    download = _call(AsyncClient.download)
    spend = _call(AsyncClient.spend)
    charges = _call(AsyncClient.charges)
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

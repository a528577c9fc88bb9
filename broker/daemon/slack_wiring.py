"""Wiring of Slack: outgoing messages and incoming requests, with the store and the API."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from broker.api.core.auth import Caller
from broker.api.core.problems import NotFound
from broker.api.service.content import Content
from broker.api.service.jobs import Service
from broker.api.service.slack import Slack
from broker.domain.job import Job
from broker.domain.tenancy import OPERATOR
from broker.notify.slack.app import SlackApp
from broker.notify.slack.notifier import SlackNotifier
from broker.notify.slack.socket_mode import SlackSockets
from broker.ports import Clock
from broker.reporting.loss_curve import Losses, losses
from broker.runtime.secret_box import SecretBox

METRICS = "metrics.jsonl"
DAEMON = Caller(team=OPERATOR.team, owner=OPERATOR.owner, scopes=frozenset({"admin"}), token_id="")


class SlackIntegration:
    """Outgoing messages and incoming requests of Slack. Until `serving` is entered, loss curves are empty."""

    def __init__(self, box: SecretBox, clock: Clock, *, api_url: str) -> None:
        self.notifier = SlackNotifier(box, clock, self._losses, api_url=api_url)
        self._app = SlackApp(self.notifier, box, clock, api_url=api_url)
        self._clock = clock
        self._api_url = api_url
        self._content: Content | None = None

    @asynccontextmanager
    async def serving(self, service: Service) -> AsyncIterator[tuple[Slack, SlackSockets]]:
        """Yield the handler of clicks and commands, and the controller that keeps its Socket Mode connections open."""
        self._content = Content(service)
        incoming = Slack(service, self._app)
        sockets = SlackSockets(self._app, incoming.channels, incoming.take, self._clock, api_url=self._api_url)
        try:
            yield incoming, sockets
        finally:
            await sockets.close()
            await incoming.close()
            await self.notifier.close()

    async def _losses(self, job: Job) -> Losses:
        """Return the loss history of the last committed checkpoint; empty if there is none, as for a script."""
        if self._content is None:
            return ()
        try:
            _, pieces = await self._content.artifact(DAEMON, job.id, METRICS)
        except NotFound:
            return ()
        return losses(b"".join([piece async for piece in pieces]))

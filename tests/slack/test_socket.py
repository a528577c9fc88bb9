"""Socket Mode over a real WebSocket: an envelope is acknowledged once stored, executed once; connections reopen."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from broker.domain.errors import StoreUnavailable
from broker.domain.notifications import Channel
from broker.notify.slack.app import SlackApp
from broker.notify.slack.notifier import SlackNotifier
from broker.notify.slack.socket_mode import SlackSockets
from broker.runtime.clock import SystemClock
from broker.runtime.control_loop import run_forever
from tests.slack.conftest import BOX, channel
from tests.slack.incoming import secured
from tests.slack.server import Slack, slack

COMMAND = {"command": "/gpubroker", "text": "status"}


@dataclass
class Rig:
    """Slack's sockets of a daemon, connected to an emulated Slack."""

    there: Slack
    channels: list[Channel]
    received: list[tuple[Sequence[Channel], str, Mapping[str, Any]]] = field(default_factory=list)
    broken: int = 0
    """Number of deliveries during which the database is unavailable."""

    def __post_init__(self) -> None:
        api_url, clock = f"{self.there.url}/api/", SystemClock()
        self.notifier = SlackNotifier(BOX, clock, self._losses, api_url=api_url)
        app = SlackApp(self.notifier, BOX, clock, api_url=api_url)
        self.sockets = SlackSockets(app, self._channels, self._take, clock, api_url=api_url)
        self.sockets.every_s = 0.02

    async def _losses(self, job: object) -> tuple[tuple[int, float], ...]:
        return ()

    async def _channels(self) -> Sequence[Channel]:
        return self.channels

    async def _take(self, channels: Sequence[Channel], envelope: str, payload: Mapping[str, Any]) -> None:
        if self.broken:
            self.broken -= 1
            raise StoreUnavailable("the database does not answer")
        self.received.append((channels, envelope, payload))


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr("broker.notify.slack.socket_mode.BACK_OFF_S", (0.01, 0.05))
    async with slack() as there:
        rig = Rig(there, [secured()])
        running = asyncio.create_task(run_forever(rig.sockets, SystemClock()))
        yield rig
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await rig.sockets.close()
        await rig.notifier.close()


async def test_a_command_is_received_and_acknowledged(rig: Rig) -> None:
    await rig.there.sockets.deliver("slash_commands", COMMAND)
    ((channels, _, payload),) = rig.received
    assert payload == COMMAND
    assert [c.id for c in channels] == ["ch1"]
    assert rig.there.count("apps.connections.open") == 1


async def test_an_unstored_envelope_is_not_acknowledged_and_repeated(rig: Rig) -> None:
    rig.broken, rig.there.sockets.retry_s = 1, 0.3
    await rig.there.sockets.deliver("interactive", COMMAND, tries=600)
    assert len(rig.there.sockets.sent) >= 2, "the envelope was not repeated"
    assert rig.received


async def test_slack_may_ask_for_a_new_connection(rig: Rig) -> None:
    sockets = rig.there.sockets
    await sockets.until(lambda: sockets.open)
    await sockets.refresh()
    await sockets.until(lambda: sockets.opened == 2)
    await sockets.until(lambda: len(sockets.open) == 1)
    await sockets.deliver("slash_commands", COMMAND)
    assert len(rig.received) == 1


async def test_a_lost_connection_is_opened_again(rig: Rig) -> None:
    sockets = rig.there.sockets
    await sockets.until(lambda: sockets.open)
    rig.there.refuse = {"apps.connections.open": "internal_error"}
    await sockets.open[-1].close()
    await sockets.until(lambda: not sockets.open)
    async with asyncio.timeout(300):
        while rig.there.count("apps.connections.open") < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    rig.there.refuse = {}
    await sockets.deliver("slash_commands", COMMAND)
    assert len(rig.received) == 1


async def test_without_an_app_token_nothing_is_opened(rig: Rig) -> None:
    sockets = rig.there.sockets
    await sockets.until(lambda: sockets.open)
    rig.channels[:] = [channel()]
    await sockets.until(lambda: not sockets.open)
    await rig.sockets.step()
    assert sockets.opened == 1

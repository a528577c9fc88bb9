"""The app that a user creates from examples/slack/manifest.yaml has exactly the rights that the notifier needs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker.api.handlers.slack import api
from broker.domain.errors import ChannelRefused, NotifyError
from broker.domain.job import JobState
from broker.domain.notifications import NOTICES, Delivery, JobSnapshot, Notice
from tests.conformance.samples import START, make_job
from tests.slack.conftest import Rig
from tests.slack.server import SCOPES
from tests.slack.test_notifier import active

MANIFEST = yaml.safe_load((Path(__file__).parents[2] / "examples/slack/manifest.yaml").read_text())
BOT = frozenset(MANIFEST["oauth_config"]["scopes"]["bot"])
LIMITS = {("display_information", "name"): 35, ("display_information", "description"): 140,
          ("features", "bot_user", "display_name"): 80}  # fmt: skip


def test_manifest_has_the_documented_shape() -> None:
    assert set(MANIFEST) <= {"_metadata", "display_information", "features", "oauth_config", "settings"}
    for path, limit in LIMITS.items():
        value: Any = MANIFEST
        for key in path:
            value = value[key]
        assert 0 < len(value) <= limit
    (command,) = MANIFEST["features"]["slash_commands"]
    assert set(command) == {"command", "description", "usage_hint", "should_escape", "url"}
    assert command["command"] == "/gpubroker"
    assert len(command["description"]) <= 2000
    assert MANIFEST["settings"]["interactivity"]["is_enabled"]


def test_manifest_urls_are_the_daemons_routes() -> None:
    (path,) = {op.path for op in api.operations if op.scope is None}
    assert MANIFEST["settings"]["interactivity"]["request_url"].endswith(path)
    assert MANIFEST["features"]["slash_commands"][0]["url"].endswith(path)


async def everything(rig: Rig) -> None:
    """Make every call that the broker makes with a bot token."""
    rig.curve = ((1, 4.0), (2, 3.0))
    job = make_job()
    await rig.tell(rig.event(job, "job.submitted"), JobSnapshot(job=job))
    await rig.tell(rig.event(job, "attempt.preempted"), active(job))
    rig.notifier = rig.another()
    ended = make_job(id=job.id, state=JobState.SUCCEEDED, finished_at=START)
    await rig.tell(rig.event(job, "job.succeeded"), JobSnapshot(job=ended))
    rig.notifier = rig.another()
    await rig.tell(Delivery(stream=NOTICES, notice=Notice(id="n", kind="digest.daily", message="m")), None)
    client = rig.notifier.client(rig.channel)
    assert await client.person("U0ANN") == "ann"
    await client.workspace()


async def test_manifest_scopes_suffice(rigs: Callable[..., Any]) -> None:
    async with rigs(scopes=BOT) as rig:
        await everything(rig)
        made = {method for method, _ in rig.slack.calls}
        assert made >= set(SCOPES) - {"chat.delete", "chat.postEphemeral"}


@pytest.mark.parametrize("scope", sorted(BOT - {"commands", "channels:history", "groups:history"}))
async def test_each_manifest_scope_is_needed(rigs: Callable[..., Any], scope: str) -> None:
    async with rigs(scopes=BOT - {scope}) as rig:
        with pytest.raises(NotifyError, match="missing_scope") as caught:
            await everything(rig)
        assert isinstance(caught.value, ChannelRefused)


async def test_manifest_has_one_history_scope_at_least(rigs: Callable[..., Any]) -> None:
    async with rigs(scopes=BOT - {"channels:history", "groups:history"}) as rig:
        with pytest.raises(ChannelRefused, match="missing_scope"):
            await everything(rig)

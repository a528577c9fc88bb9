"""Clicks and commands of Slack users, signed as Slack signs them, against the real API over a store."""

import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import pytest

from broker.api.http.context import SLACK
from broker.api.service.slack import Slack as Incoming
from broker.domain.job import RESTING_JOB_STATES, Job, JobState
from broker.domain.notifications import Channel, SlackUser
from broker.domain.tenancy import Scope
from broker.notify.slack.app import SlackApp
from broker.notify.slack.blocks import buttons
from broker.notify.slack.notifier import SlackNotifier
from broker.ports import Store
from broker.runtime.clock import SystemClock
from broker.store.postgres.store import PostgresStore
from tests.api.harness import Running, memory_blobs, serving
from tests.conformance.samples import START, make_job
from tests.slack.conftest import BOX, channel
from tests.slack.server import BOT_TOKEN, WORKSPACE, Slack, slack
from tests.support.memory_store.store import MemoryStore

SECRET = "8f742231b10e8888abcd99yyyzzz85a5"
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


def secured(secret: str = SECRET, **changes: Any) -> Channel:
    sealed = BOX.seal(json.dumps({"bot_token": BOT_TOKEN, "signing_secret": secret, "app_token": "xapp-test-app"}))
    return channel(**{"sealed": sealed, **changes})


@dataclass
class Rig:
    there: Slack
    api: Running
    store: Store
    incoming: Incoming

    async def post(
        self,
        body: bytes,
        *,
        secret: str = SECRET,
        age_s: float = 0,
        status: int = 200,
        headers: Mapping[str, str] = FORM,
    ) -> dict[str, Any]:
        at = f"{SystemClock().now().timestamp() - age_s:.0f}"
        mac = hmac.new(secret.encode(), f"v0:{at}:".encode() + body, hashlib.sha256).hexdigest()
        signed = {"X-Slack-Request-Timestamp": at, "X-Slack-Signature": f"v0={mac}", **FORM, **headers}
        answer = await self.api.call("POST", "/v1/slack", signed, status, data=body)
        await self.incoming.close()
        return answer

    async def press(self, job: Job, action: str, *, value: str | None = None, user: str = "U0ANN", **how: Any) -> str:
        """Press a button as a Slack user, and return the answer that the user gets."""
        offered = {b["action_id"]: b["value"] for b in buttons(job)}
        url = self.there.response_url()
        payload = {
            "type": "block_actions", "user": {"id": user, "team_id": WORKSPACE}, "team": {"id": WORKSPACE},
            "channel": {"id": "C0JOBS"}, "response_url": url,
            "actions": [
                {"type": "button", "action_id": f"gpubroker.{action}",
                 "value": offered[f"gpubroker.{action}"] if value is None else value}
            ],
        }  # fmt: skip
        await self.post(urlencode({"payload": json.dumps(payload)}).encode(), **how)
        return self.answer_text(url)

    async def command(self, text: str, *, user: str = "U0ANN", **how: Any) -> str:
        url = self.there.response_url()
        form = {
            "command": "/gpubroker", "text": text, "user_id": user, "team_id": WORKSPACE, "channel_id": "C0JOBS",
            "response_url": url,
        }  # fmt: skip
        await self.post(urlencode(form).encode(), **how)
        return self.answer_text(url)

    def answers(self, url: str) -> list[dict[str, Any]]:
        return self.there.responses[url.rsplit("/", 1)[-1]]

    def answer_text(self, url: str) -> str:
        own = [a for a in self.answers(url) if not a["replace_original"]]
        return "\n".join(a["blocks"][0]["text"]["text"] for a in own)

    async def job(self, state: JobState = JobState.QUEUED, **changes: Any) -> Job:
        ended = {"finished_at": START} if state in RESTING_JOB_STATES else {}
        made = make_job(state=state, **ended, **changes)
        job, _ = await self.store.submit(made, key=None, body_sha256="", events=[])
        return job

    async def link(self, *scopes: Scope, user: str = "U0ANN", team: str = "default", owner: str = "ann") -> None:
        await self.store.put_slack_user(
            SlackUser(team=team, workspace=WORKSPACE, user=user, owner=owner, scopes=scopes or ("read", "submit"))
        )

    async def now(self, job: Job) -> Job:
        row = await self.store.job(job.id)
        assert row is not None
        return row


@asynccontextmanager
async def rig_on(store: Store) -> AsyncIterator[Rig]:
    async with slack() as there, serving(store, memory_blobs()) as api:
        api_url = f"{there.url}/api/"
        clock = SystemClock()
        notifier = SlackNotifier(BOX, clock, _no_curve, api_url=api_url)
        incoming = Incoming(api.service, SlackApp(notifier, BOX, clock, api_url=api_url))
        api.app._state[SLACK] = incoming  # the harness serves without Slack
        await store.add_channel(secured())
        yield Rig(there, api, store, incoming)
        await notifier.close()


async def _no_curve(job: Job) -> tuple[tuple[int, float], ...]:
    return ()


@pytest.fixture(name="store", params=["memory", "postgres"])
async def either_store(request: pytest.FixtureRequest, postgres_dsn: str) -> AsyncIterator[Store]:
    if request.param == "memory":
        made: Store = MemoryStore(SystemClock())
    else:
        made = await PostgresStore.connect(postgres_dsn)
    yield made
    await made.close()


@pytest.fixture(name="rig")
async def signed_desk(store: Store) -> AsyncIterator[Rig]:
    async with rig_on(store) as made:
        yield made

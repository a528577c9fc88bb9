"""End to end: a daemon, killed in the middle, reports a job in one thread and handles a click about it."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml

from broker.api.schemas.slack_users import SlackLinkRequest
from tests.crash.daemon import Daemon, submit
from tests.slack.server import APP_TOKEN, BOT_TOKEN, WORKSPACE, Slack, slack

SECRETS = f"bot_token={BOT_TOKEN}\nsigning_secret=8f742231b10e8888abcd99yyyzzz85a5\napp_token={APP_TOKEN}\n"


@pytest.fixture
async def there() -> AsyncIterator[Slack]:
    async with slack() as state:
        yield state


@pytest.fixture
async def daemon(there: Slack) -> AsyncIterator[Daemon]:
    daemon = Daemon()
    file = daemon.home / "gpubroker.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"slack": {"api_url": f"{there.url}/api/"}}))
    await daemon.start()
    yield daemon
    await daemon.remove()


async def gpubroker(daemon: Daemon, *words: str, stdin: str = "") -> Any:
    """Run a command in a process of its own, and return its JSON."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "broker.cli", *words, "--json", stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={"GPUBROKER_HOME": str(daemon.home)},
    )  # fmt: skip
    out, err = await process.communicate(stdin.encode())
    assert process.returncode == 0, f"{err.decode()}\n{daemon.log()}"
    return json.loads(out)


async def until(there: Slack, text: str, *, within_s: float = 300.0) -> None:
    """Poll Slack until it shows `text`, because Slack's state is only visible by polling."""
    async with asyncio.timeout(within_s):
        while text not in json.dumps(there.messages(), ensure_ascii=False) + json.dumps(  # noqa: ASYNC110
            [m for root in there.messages() for m in there.messages(thread=root["ts"])], ensure_ascii=False
        ):
            await asyncio.sleep(0.05)


async def test_one_thread_reports_a_whole_job(there: Slack, daemon: Daemon) -> None:
    await gpubroker(daemon, "channel", "add", "slack", "jobs", "--channel", "C0JOBS", stdin=SECRETS)
    tested = await gpubroker(daemon, "channel", "test", "jobs")
    assert tested[0]["delivered"], tested
    assert "a test of the channel jobs" in there.messages()[0]["text"]
    await there.sockets.until(lambda: there.sockets.open)

    async with daemon.client() as client:
        job = await submit(client, 10_000)
        await until(there, "Running")
        await daemon.kill()
        await daemon.start()
    async with daemon.client() as client:
        await client.link_slack_user(SlackLinkRequest(user="U0ANN", owner="ann"))
        await until(there, "attempt 1 training")
        url = there.response_url()
        payload = {
            "type": "block_actions", "user": {"id": "U0ANN", "team_id": WORKSPACE}, "team": {"id": WORKSPACE},
            "channel": {"id": "C0JOBS"}, "response_url": url,
            "actions": [{"type": "button", "action_id": "gpubroker.cancel", "value": job}],
        }  # fmt: skip
        there.sockets.retry_s = 1.0
        await there.sockets.deliver("interactive", payload, tries=300)
        await until(there, "counting cancelled")
        await until(there, "⏹️ counting")
        detail = await client.job(job)
    assert detail.state == "cancelled"
    (root,) = [m for m in there.messages() if "job" in m["metadata"]["event_payload"]]
    kinds = [m["text"].split(".")[0] for m in there.messages(thread=root["ts"])]
    assert kinds == ["counting: Bought", "counting: Running", "counting: Stopping", kinds[-1]]
    assert "counting cancelled" in kinds[-1]
    assert not any(token in daemon.log() for token in (BOT_TOKEN, APP_TOKEN, "8f742231b10e8888"))

"""The loopback Slack, driven by slack_sdk, refuses what Slack's documentation says."""

from collections.abc import AsyncIterator

import pytest
from slack_sdk.errors import SlackApiError
from slack_sdk.web.async_client import AsyncWebClient

from tests.slack.server import BOT_TOKEN, Slack, slack


@pytest.fixture
async def there() -> AsyncIterator[Slack]:
    async with slack() as state:
        yield state


def client(there: Slack, token: str = BOT_TOKEN) -> AsyncWebClient:
    return AsyncWebClient(token, base_url=f"{there.url}/api/", retry_handlers=[])


async def error(call: object) -> str:
    with pytest.raises(SlackApiError) as caught:
        await call  # type: ignore[misc]
    return str(caught.value.response["error"])


async def test_server_posts_updates_and_reads_a_thread(there: Slack) -> None:
    c = client(there)
    metadata = {"event_type": "gpubroker", "event_payload": {"job": "j"}}
    root = await c.chat_postMessage(channel="C0JOBS", text="root", metadata=metadata)
    await c.chat_postMessage(channel="C0JOBS", text="reply", thread_ts=root["ts"])
    await c.chat_update(channel="C0JOBS", ts=root["ts"], text="root 2")
    replies = await c.conversations_replies(channel="C0JOBS", ts=root["ts"], include_all_metadata=True)
    assert [(m["text"], m.get("metadata")) for m in replies["messages"]] == [("root 2", metadata), ("reply", None)]
    plain = await c.conversations_history(channel="C0JOBS")
    assert [m.get("metadata") for m in plain["messages"]] == [None]


async def test_server_refuses_as_documented(there: Slack) -> None:
    c = client(there)
    assert await error(client(there, "xoxb-other").auth_test()) == "invalid_auth"
    assert await error(c.chat_postMessage(channel="C9", text="x")) == "channel_not_found"
    assert await error(c.chat_postMessage(channel="C0ELSE", text="x")) == "not_in_channel"
    assert await error(c.chat_postMessage(channel="C0JOBS", text="x" * 4001)) == "msg_too_long"
    assert await error(c.chat_update(channel="C0JOBS", ts="1.2", text="x")) == "message_not_found"
    assert await error(c.users_info(user="U9")) == "user_not_found"
    section = {"type": "section", "text": {"type": "mrkdwn", "text": "x" * 3001}}
    assert await error(c.chat_postMessage(channel="C0JOBS", text="x", blocks=[section])) == "invalid_blocks"
    assert await error(c.chat_postMessage(channel="C0JOBS", text="x", blocks=[{"type": "divider"}] * 51)) == (
        "invalid_blocks"
    )


async def test_an_upload_becomes_a_message_of_the_thread(there: Slack) -> None:
    c = client(there)
    root = await c.chat_postMessage(channel="C0JOBS", text="root")
    await c.files_upload_v2(filename="loss.png", content=b"png", channel="C0JOBS", thread_ts=root["ts"])
    assert [m["files"][0]["name"] for m in there.messages(thread=root["ts"])] == ["loss.png"]


async def test_server_limits_each_channel_to_about_a_message_a_second() -> None:
    time = [0.0]
    async with slack(now=lambda: time[0]) as there:
        there.limits.enforced = True
        c = client(there)
        for _ in range(4):
            await c.chat_postMessage(channel="C0JOBS", text="x")
        with pytest.raises(SlackApiError) as caught:
            await c.chat_postMessage(channel="C0JOBS", text="x")
        assert caught.value.response.status_code == 429
        assert caught.value.response.headers["Retry-After"] == "1"
        time[0] += 1
        await c.chat_postMessage(channel="C0JOBS", text="x")

"""Channels over HTTP: ownership, hidden secrets and a real message."""

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.api.harness import Running
from tests.unit.broker.notify.harness import always, receiving

HOOK = {"kind": "webhook", "name": "hook", "secrets": {"url": "https://hooks.example.com/in?token=hush"}}


async def added(api: Running, who: Mapping[str, str], **changes: Any) -> dict[str, Any]:
    return await api.call("POST", "/v1/channels", who, 201, json=HOOK | changes)


async def test_a_webhook_shows_its_secret_once_and_its_url_never(
    api: Running, caplog: pytest.LogCaptureFixture
) -> None:
    ann = await api.token("ann", "manage")
    made = await added(api, ann, events=["attempt.*", "job.succeeded"])
    assert made["secret"].startswith("whsec_")
    shown = await api.call("GET", f"/v1/channels/{made['id']}", ann, 200)
    assert (shown["name"], shown["team"], shown["config"]) == ("hook", "default", {"host": "hooks.example.com"})
    assert (shown["events"], shown["enabled"], shown["waiting"], shown["dropped"]) == (
        ["attempt.*", "job.succeeded"],
        True,
        0,
        {},
    )
    listed = await api.call("GET", "/v1/channels", ann, 200)
    assert listed["items"] == [shown]
    audit = await api.call("GET", "/v1/audit", ann, 200)
    for text in (json.dumps(listed), json.dumps(audit), caplog.text):
        assert "hush" not in text
        assert made["secret"] not in text


async def test_only_managers_of_the_team_and_operators_see_a_channel(api: Running) -> None:
    ann, bob = await api.token("ann", "manage"), await api.token("bob", "manage", team="red")
    reader, root = await api.token("eve", "read", "submit"), await api.token("root", "admin")
    made = await added(api, ann)
    for method, path, body in (
        ("GET", "", None), ("PATCH", "", {"enabled": False}), ("DELETE", "", None), ("POST", "/test", None),
        ("POST", "/rotate", None),
    ):  # fmt: skip
        where = f"/v1/channels/{made['id']}{path}"
        foreign = await api.call(method, where, bob, 404, json=body)
        missing = await api.call(method, where.replace(made["id"], "a" * 13), bob, 404, json=body)
        assert foreign["detail"].replace(made["id"], "") == missing["detail"].replace("a" * 13, "")
        await api.call(method, where, reader, 403, json=body)
    assert (await api.call("GET", "/v1/channels", bob, 200))["items"] == []
    of_root = (await api.call("GET", "/v1/channels", root, 200))["items"]
    assert [(one["name"], one["team"]) for one in of_root] == [("log", None), ("hook", "default")]
    assert (await added(api, bob))["id"] != made["id"]


async def test_only_operators_create_installation_or_foreign_team_channels(api: Running) -> None:
    ann, root = await api.token("ann", "manage"), await api.token("root", "admin")
    await api.token("bob", "manage", team="red")
    await api.call("POST", "/v1/channels", ann, 403, json=HOOK | {"installation": True})
    refused = await api.call("POST", "/v1/channels", ann, 422, json=HOOK | {"team": "red"})
    assert refused["errors"][0]["field"] == "team"
    await added(api, root, installation=True)
    await added(api, root, team="red")
    channels = (await api.call("GET", "/v1/channels", root, 200))["items"]
    assert sorted((channel["name"], channel["team"] or "") for channel in channels) == [
        ("hook", ""),
        ("hook", "red"),
        ("log", ""),
    ]


@pytest.mark.parametrize(
    ("changes", "status", "field"),
    [
        ({"kind": "pigeon"}, 422, "kind"),
        ({"kind": "log"}, 422, "kind"),
        ({"secrets": {"url": "http://hooks.example.com/"}}, 422, "secrets.url"),
        ({"secrets": {"url": "https://127.1/x"}}, 422, "secrets.url"),
        ({"secrets": {}}, 422, "secrets.url"),
        ({"config": {"retries": "3"}}, 422, "config.retries"),
        ({"name": "No Name"}, 422, "name"),
        ({"events": ["attempt*"]}, 422, "events.0"),
        ({"team": "nobody"}, 422, "team"),
    ],
)
async def test_a_bad_channel_is_refused_with_the_place(
    api: Running, changes: dict[str, Any], status: int, field: str
) -> None:
    ann = await api.token("ann", "manage")
    refused = await api.call("POST", "/v1/channels", ann, status, json=HOOK | changes)
    assert [fault["field"] for fault in refused["errors"]] == [field]
    assert "hush" not in json.dumps(refused)
    assert (await api.call("GET", "/v1/channels", ann, 200))["items"] == []


async def test_channel_names_are_unique(api: Running) -> None:
    ann = await api.token("ann", "manage")
    await added(api, ann)
    assert "choose another name" in (await api.call("POST", "/v1/channels", ann, 409, json=HOOK))["detail"]


async def test_a_test_is_a_real_signed_message(api: Running) -> None:
    ann = await api.token("ann", "manage")
    async with receiving(always(200)) as receiver:
        made = await added(api, ann, secrets={"url": f"http://127.0.0.1:{receiver.port}/in"})
        delivery = await api.call("POST", f"/v1/channels/{made['id']}/test", ann, 200)
    assert delivery["delivered"] is True
    ((headers, body),) = receiver.got
    headers = {name.lower(): text for name, text in headers.items()}
    content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    key = base64.b64decode(made["secret"].removeprefix("whsec_"))
    wanted = base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode()
    assert headers["webhook-signature"] == f"v1,{wanted}"
    assert json.loads(body)["type"] == "channel.test"
    again = await api.call("POST", f"/v1/channels/{made['id']}/test", ann, 200)
    assert again["delivered"] is False
    assert f"127.0.0.1:{receiver.port}" in again["detail"]


async def test_a_rotated_channel_signs_with_both_secrets(api: Running) -> None:
    ann = await api.token("ann", "manage")
    async with receiving(always(200)) as receiver:
        made = await added(api, ann, secrets={"url": f"http://127.0.0.1:{receiver.port}/in"})
        rotated = await api.call("POST", f"/v1/channels/{made['id']}/rotate", ann, 200)
        assert rotated["secret"] not in (None, made["secret"])
        await api.call("POST", f"/v1/channels/{made['id']}/test", ann, 200)
    headers = {name.lower(): text for name, text in receiver.got[0][0].items()}
    assert len(headers["webhook-signature"].split(" ")) == 2


async def test_a_channel_is_changed_disabled_and_removed(api: Running) -> None:
    ann = await api.token("ann", "manage")
    path = f"/v1/channels/{(await added(api, ann))['id']}"
    off = await api.call("PATCH", path, ann, 200, json={"enabled": False})
    assert (off["enabled"], off["reason"], off["events"]) == (False, "disabled by ann", [])
    on = await api.call("PATCH", path, ann, 200, json={"enabled": True, "events": ["job.*"]})
    assert (on["enabled"], on["reason"], on["events"]) == (True, "", ["job.*"])
    await api.call("DELETE", path, ann, 204)
    await api.call("GET", path, ann, 404)


async def test_the_log_stays_but_may_be_silenced(api: Running) -> None:
    root = await api.token("root", "admin")
    assert "disable it instead" in (await api.call("DELETE", "/v1/channels/log", root, 409))["detail"]
    await api.call("POST", "/v1/channels/log/rotate", root, 409)
    assert (await api.call("POST", "/v1/channels/log/test", root, 200))["delivered"] is True
    assert (await api.call("PATCH", "/v1/channels/log", root, 200, json={"enabled": False}))["enabled"] is False

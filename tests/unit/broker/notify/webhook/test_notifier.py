"""Webhooks over real sockets on loopback: signatures, answers, settings."""

import asyncio
import base64
import hashlib
import hmac
import json
import socket
from dataclasses import replace
from datetime import timedelta

import pytest
from aiohttp import web

from broker.domain.errors import ChannelRefused, InvalidInput, NotDelivered, RetryAfter
from broker.domain.notifications import NOTICES, Delivery, Notice
from broker.notify.webhook.notifier import ROTATION_S
from broker.runtime.secret_box import SecretBox
from tests.conformance.samples import START
from tests.unit.broker.notify.harness import DELIVERY, SNAPSHOT, Rig, always, receiving


def verify(secret: str, headers: dict[str, str], body: bytes) -> bool:
    """Verify a signature exactly as Standard Webhooks defines it."""
    content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    wanted = hmac.new(base64.b64decode(secret.removeprefix("whsec_")), content, hashlib.sha256).digest()
    signatures = headers["webhook-signature"].split(" ")
    return any(hmac.compare_digest(signature, "v1," + base64.b64encode(wanted).decode()) for signature in signatures)


# ------------------------------------------------------------------------------------------------------------ content


async def test_an_event_is_one_signed_post_with_the_job(rig: Rig) -> None:
    async with receiving(always(204)) as receiver:
        await rig.send(f"http://127.0.0.1:{receiver.port}/in?token=t")
    ((headers, body),) = receiver.got
    document = json.loads(body)
    assert (document["type"], document["timestamp"]) == ("attempt.preempted", START.isoformat())
    assert document["data"]["message"] == "gone ü"
    assert (document["data"]["seq"], document["data"]["folded"], document["data"]["detail"]) == (7, 2, {"step": 3})
    assert document["data"]["job"]["spent_usd"] == "0"
    assert document["data"]["job"]["attempt"]["usd_per_hour"] == "0.731234"
    headers = {name.lower(): text for name, text in headers.items()}
    assert headers["content-type"] == "application/json"
    assert headers["webhook-id"] == DELIVERY.id
    assert headers["webhook-timestamp"] == str(int(START.timestamp()))
    secret = "whsec_" + base64.b64encode(b"k" * 32).decode()
    assert verify(secret, headers, body)
    assert not verify(secret, headers, body + b" ")
    assert not verify(secret, headers | {"webhook-timestamp": "1"}, body)
    assert not verify(secret, headers | {"webhook-id": "evt_x"}, body)


async def test_a_notice_has_no_job(rig: Rig) -> None:
    notice = Notice(id="n-1", kind="budget.threshold", message="80 %", team="nlp", data={"at": 0.8}, at=START)
    async with receiving(always(200)) as receiver:
        await rig.send(f"http://127.0.0.1:{receiver.port}/", delivery=Delivery(stream=NOTICES, notice=notice))
    document = json.loads(receiver.got[0][1])
    assert (document["type"], document["data"]["team"], document["data"]["detail"]) == (
        "budget.threshold",
        "nlp",
        {"at": 0.8},
    )
    assert "job" not in document["data"]


async def test_a_rotated_secret_and_the_one_before_both_sign_for_a_day(rig: Rig) -> None:
    first, shown_first = rig.notifier.fresh({"url": "u"})
    second, shown = rig.notifier.fresh(first)
    assert (shown_first, shown) == (first["signing"], second["signing"])
    assert len(base64.b64decode(second["signing"].removeprefix("whsec_"))) == 32
    signing = {name: text for name, text in second.items() if name != "url"}
    async with receiving(always(200)) as receiver:
        url = f"http://127.0.0.1:{receiver.port}/"
        await rig.send(url, secrets=signing)
        rig.clock.time += timedelta(seconds=ROTATION_S + 1)
        await rig.send(url, secrets=signing)
    (early, body), (late, _) = [({k.lower(): v for k, v in h.items()}, b) for h, b in receiver.got]
    assert verify(first["signing"], early, body)
    assert verify(second["signing"], early, body)
    assert verify(second["signing"], late, body)
    assert not verify(first["signing"], late, body)


# ------------------------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
async def test_any_2xx_is_a_success(rig: Rig, status: int) -> None:
    async with receiving(always(status)) as receiver:
        await rig.send(f"http://127.0.0.1:{receiver.port}/")


@pytest.mark.parametrize("status", [400, 401, 404, 413, 429, 500, 502, 503])
async def test_other_answers_are_failures(rig: Rig, status: int) -> None:
    async with receiving(always(status)) as receiver:
        with pytest.raises(NotDelivered, match=f"127.0.0.1:{receiver.port} answered {status}") as caught:
            await rig.send(f"http://127.0.0.1:{receiver.port}/hush?token=hush")
    assert "hush" not in str(caught.value)


async def test_a_receiver_that_is_gone_ends_the_channel(rig: Rig) -> None:
    async with receiving(always(410)) as receiver:
        with pytest.raises(ChannelRefused, match="410"):
            await rig.send(f"http://127.0.0.1:{receiver.port}/")


@pytest.mark.parametrize(
    ("header", "pause_s"),
    [("30", 30), ("0", 0), ("999999999999999999999", 86_400), ("Sun, 01 Mar 2026 12:02:00 GMT", 120),
     ("Sun, 01 Mar 2026 11:00:00 GMT", 0)],
)  # fmt: skip
async def test_retry_after_is_obeyed(rig: Rig, header: str, pause_s: float) -> None:
    for status in (429, 503):
        async with receiving(always(status, Retry_After=header)) as receiver:
            with pytest.raises(RetryAfter) as caught:
                await rig.send(f"http://127.0.0.1:{receiver.port}/")
        assert caught.value.after_s == pause_s


async def test_a_malformed_retry_after_is_a_failure(rig: Rig) -> None:
    async with receiving(always(429, Retry_After="soon")) as receiver:
        with pytest.raises(NotDelivered):
            await rig.send(f"http://127.0.0.1:{receiver.port}/")


async def test_no_redirect_is_followed(rig: Rig) -> None:
    async with receiving(always(200)) as inner:
        async with receiving(always(307, Location=f"http://127.0.0.1:{inner.port}/")) as receiver:
            with pytest.raises(NotDelivered, match="307; redirects are not followed"):
                await rig.send(f"http://127.0.0.1:{receiver.port}/")
        assert inner.got == []


async def test_a_receiver_that_drips_is_cut_off(rig: Rig) -> None:
    """The receiver is never silent for long and never done, so only the limit on the total time ends the call."""
    notifier = rig.make(insecure_hosts=["127.0.0.1"], total_s=0.3)

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for byte in b"HTTP/1.1 200 OK\r\nX-Slow: " + b"a" * 10_000:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.01)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(NotDelivered, match=r"did not answer within 0.3 s"):
            await notifier.deliver(rig.channel(f"http://127.0.0.1:{port}/"), DELIVERY, SNAPSHOT, None)


async def test_an_endless_answer_is_not_read(rig: Rig) -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b"a" * 65_536)
            sent += 65_536

    async with receiving(endless) as receiver:
        await rig.send(f"http://127.0.0.1:{receiver.port}/")
    assert sent < 64 * 1024**2


@pytest.mark.parametrize("pause", ["²", "Mon, 01 Jan 2024 00:00:00 +24000000000000000000", "soon"])
async def test_a_non_finite_retry_after_is_a_failure(rig: Rig, pause: str) -> None:
    async def busy(request: web.Request) -> web.Response:
        return web.Response(status=429, headers={"Retry-After": pause})

    async with receiving(busy) as receiver:
        with pytest.raises(NotDelivered, match="answered 429"):
            await rig.send(f"http://127.0.0.1:{receiver.port}/")


async def test_a_refused_connection_is_a_failure_without_the_url(rig: Rig) -> None:
    with socket.socket() as free:  # bound, so that no other process listens there meanwhile
        free.bind(("127.0.0.1", 0))
        with pytest.raises(NotDelivered, match="onnect") as caught:
            await rig.send(f"http://127.0.0.1:{free.getsockname()[1]}/hush")
    assert "hush" not in str(caught.value)


# ----------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "is not a URL"),
        ("nonsense", "is not a URL"),
        ("https://", "is not a URL"),
        ("https://h/\r\nX: y", "is not a URL"),
        ("https://h/ x", "is not a URL"),
        ("https://h/" + "a" * 2000, "is not a URL"),
        ("http://h/x", "is not https"),
        ("ftp://h/x", "is not https"),
        ("https://ann:secret@h/x", "has credentials"),
        ("https://h/x#part", "fragment"),
        ("https://10.0.0.1/x", "not a public address"),
        ("https://2130706433/x", "not a public address"),
        ("https://[::1]/x", "not a public address"),
        ("ftp://127.0.0.1/x", "neither https nor http"),
        ("https://[::1", "is not a URL"),
    ],
)
def test_a_bad_url_is_refused_with_the_fix(rig: Rig, url: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        rig.notifier.check({}, {"url": url})
    assert caught.value.problems[0].field == "secrets.url"
    assert "secret@" not in str(caught.value)


def test_the_url_is_a_secret_and_its_host_is_shown(rig: Rig) -> None:
    config, secrets = rig.notifier.check({}, {"url": "https://Hooks.Example.com:8443/in/token"})
    assert (config, secrets) == (
        {"host": "hooks.example.com:8443"},
        {"url": "https://Hooks.Example.com:8443/in/token"},
    )


def test_unknown_settings_are_refused(rig: Rig) -> None:
    with pytest.raises(InvalidInput, match=r"config\.retries.*secrets\.key"):
        rig.notifier.check({"retries": 1}, {"url": "https://h.example/", "key": "x"})


async def test_a_host_that_is_no_longer_allowed_is_not_reached(rig: Rig) -> None:
    async with receiving(always(200)) as receiver:
        with pytest.raises(NotDelivered, match="is not https"):
            await rig.make().deliver(rig.channel(f"http://127.0.0.1:{receiver.port}/"), DELIVERY, SNAPSHOT, None)
        assert receiver.got == []


async def test_a_secret_is_opened_by_its_own_key_only(rig: Rig) -> None:
    foreign = replace(rig.channel("https://h.example/"), sealed=SecretBox(bytes(32)).seal("{}"))
    with pytest.raises(Exception, match="does not open"):
        await rig.notifier.deliver(foreign, DELIVERY, SNAPSHOT, None)

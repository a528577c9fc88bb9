"""Webhooks reach public addresses only, over TLS that is checked; real sockets on loopback."""

import asyncio
from pathlib import Path

import pytest

from broker.domain.errors import NotDelivered
from broker.runtime.network import address_guard as webhook_address
from broker.runtime.network.address_guard import public
from tests.unit.broker.notify.harness import DELIVERY, SNAPSHOT, Names, Rig, always, receiving
from tests.unit.broker.notify.tls import Authority

# ---------------------------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.255.255.254", "0.0.0.0", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1",
        "169.254.169.254", "169.254.170.2", "100.64.0.1", "100.100.100.200", "168.63.129.16", "192.0.0.192",
        "192.0.2.1", "192.88.99.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255",
        "240.0.0.1", "255.255.255.255",
        "::", "::1", "::ffff:127.0.0.1", "::ffff:7f00:1", "::ffff:8.8.8.8", "::8.8.8.8", "::127.0.0.1",
        "64:ff9b::7f00:1", "64:ff9b::8.8.8.8", "64:ff9b:1::1", "100::1", "2001::1", "2001:0:7f00:1::", "2001:10::1",
        "2001:db8::1", "2002:7f00:1::", "2002:808:808::1", "3fff::1", "fc00::1", "fd00:ec2::254", "fe80::1",
        "fe80::1%eth0", "fec0::1", "ff02::1", "4000::1",
        "2130706433", "0177.0.0.1", "0x7f.1", "0x7f000001", "127.1", "127.0.1", "localhost", "", "1.2.3.4.5",
        "2606:4700::1111%eth0",
    ],
)  # fmt: skip
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    assert not public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "100.63.255.255", "2606:4700::1111", "2a00:1450::1"])
def test_a_public_address_is_taken(address: str) -> None:
    assert public(address)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.1", "2130706433", "0177.0.0.1", "0x7f.1", "0x7f000001", "[::1]", "[::ffff:127.0.0.1]",
     "[::ffff:7f00:1]", "localhost", "LOCALHOST", "127.0.0.1.", "[64:ff9b::7f00:1]", "[2002:7f00:1::]"],
)  # fmt: skip
async def test_no_spelling_of_loopback_reaches_it(rig: Rig, host: str) -> None:
    """No socket to loopback is made, whichever address the host in the URL resolves to."""
    touched: list[object] = []
    server = await asyncio.start_server(lambda reader, writer: touched.append(writer), None, 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        notifier = rig.make()
        with pytest.raises(NotDelivered):
            await notifier.deliver(rig.channel(f"https://{host}:{port}/"), DELIVERY, SNAPSHOT, None)
        await asyncio.sleep(0)
    assert touched == []


async def test_a_second_answer_of_the_dns_reaches_nothing_private(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """127.0.0.2 plays the public address here, 127.0.0.1 the private one that the name points to later."""
    monkeypatch.setattr(webhook_address, "public", lambda text: text == "127.0.0.2")
    authority = Authority(tmp_path)
    tls = authority.server("hooks.test")
    names = Names(hooks_test=[["127.0.0.2"], ["127.0.0.1"]])
    notifier = rig.make(resolver=names, tls=authority.client())
    async with (
        receiving(always(200), host="127.0.0.2", tls=tls) as outside,
        receiving(always(200), host="127.0.0.1", tls=tls, port=outside.port) as inside,
    ):
        channel = rig.channel(f"https://hooks.test:{outside.port}/")
        await notifier.deliver(channel, DELIVERY, SNAPSHOT, None)
        assert len(outside.got) == 1
        await notifier.close()
        again = rig.make(resolver=names, tls=authority.client())
        with pytest.raises(NotDelivered, match="it has no public address"):
            await again.deliver(channel, DELIVERY, SNAPSHOT, None)
        assert inside.got == []
    assert names.asked == ["hooks.test", "hooks.test"]


async def test_the_addresses_of_a_private_name_are_not_shown(rig: Rig) -> None:
    notifier = rig.make(resolver=Names(db_internal=[["127.0.0.1", "::1"]]))
    with pytest.raises(NotDelivered, match="no public address") as caught:
        await notifier.deliver(rig.channel("https://db.internal:9/"), DELIVERY, SNAPSHOT, None)
    assert "127.0.0.1" not in str(caught.value)
    assert "::1" not in str(caught.value)


async def test_only_public_addresses_of_a_name_are_tried(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_address, "public", lambda text: text == "127.0.0.2")
    authority = Authority(tmp_path)
    tls = authority.server("hooks.test")
    notifier = rig.make(resolver=Names(hooks_test=[["127.0.0.1", "::1", "127.0.0.2"]]), tls=authority.client())
    async with (
        receiving(always(200), host="127.0.0.2", tls=tls) as outside,
        receiving(always(200), host="127.0.0.1", tls=tls, port=outside.port) as inside,
    ):
        await notifier.deliver(rig.channel(f"https://hooks.test:{outside.port}/"), DELIVERY, SNAPSHOT, None)
        assert (len(outside.got), len(inside.got)) == (1, 0)


# ---------------------------------------------------------------------------------------------------------------- TLS


async def test_https_is_checked_against_the_name_in_the_url(rig: Rig, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    right, wrong = authority.server("hooks.test"), authority.server("other.test")
    names = Names(hooks_test=[["127.0.0.1"]])
    asked: list[str | None] = []
    right.sni_callback = lambda connection, name, context: asked.append(name)
    notifier = rig.make(insecure_hosts=["hooks.test"], resolver=names, tls=authority.client())
    async with receiving(always(200), tls=right) as receiver:
        await notifier.deliver(rig.channel(f"https://hooks.test:{receiver.port}/"), DELIVERY, SNAPSHOT, None)
    assert asked == ["hooks.test"]
    assert receiver.got[0][0]["Host"] == f"hooks.test:{receiver.port}"
    async with receiving(always(200), tls=wrong) as receiver:
        with pytest.raises(NotDelivered, match="its certificate is refused"):
            await notifier.deliver(rig.channel(f"https://hooks.test:{receiver.port}/"), DELIVERY, SNAPSHOT, None)
    assert receiver.got == []


async def test_an_unknown_authority_is_refused(rig: Rig, tmp_path: Path) -> None:
    notifier = rig.make(insecure_hosts=["hooks.test"], resolver=Names(hooks_test=[["127.0.0.1"]]))
    async with receiving(always(200), tls=Authority(tmp_path).server("hooks.test")) as receiver:
        with pytest.raises(NotDelivered, match="its certificate is refused"):
            await notifier.deliver(rig.channel(f"https://hooks.test:{receiver.port}/"), DELIVERY, SNAPSHOT, None)
    assert receiver.got == []

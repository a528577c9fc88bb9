"""Programs on a job's machine, run next to the agent over a WebSocket."""

import asyncio
import json
import os
import select
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from broker.api.core.stream_limits import StreamLimits
from broker.api.http.context import STREAMS
from broker.daemon.app import _reach
from broker.domain.ids import JobId
from broker.domain.job import AttemptState, Handle
from broker.ports import Change, Lane
from tests.api.harness import SEEN, Running, spec
from tests.api.test_files import admitted


@pytest.fixture
async def training(api: Running) -> tuple[str, dict[str, str]]:
    """Return (job whose machine is this host, headers of its owner)."""
    headers = await api.token("ann")
    ref = (await api.upload(headers, b"word,definition\na,b\nc,d\n" * 20))["ref"]
    job = (await api.call("POST", "/v1/jobs", headers, 202, json=spec(ref)))["id"]
    attempt = await admitted(api, job)

    async def reach(handle: Handle, words: Sequence[str], tty: bool) -> Sequence[str]:
        assert handle.id == "m1"
        return list(words) or ["sh", "-i"]

    api.service.reach = reach
    store = api.service.store
    for leased in await store.claim_attempts(Lane.LAUNCH, owner="t", lease_s=60, limit=9):
        if leased.attempt.id == attempt:
            handle = Handle(provider="simulated", id="m1", name=leased.attempt.name)
            launching = replace(leased.attempt, state=AttemptState.BOOTING, handles=(handle,), create_sent_at=SEEN)
            assert all(await store.apply([Change(attempt=(leased.attempt, launching))]))
    return job, headers


async def ran(
    api: Running, job: str, headers: dict[str, str], *words: str, tty: bool = False, stdin: bytes = b""
) -> tuple[int, bytes, bytes]:
    """Return (exit code, output, errors)."""
    parts = {1: b"", 2: b""}
    url, params = f"{api.url}/v1/jobs/{job}/shell", [("word", w) for w in words] + [("tty", str(int(tty)))]
    async with api.http.ws_connect(url, headers=headers, params=params) as socket:
        if tty:
            await socket.send_str(json.dumps({"resize": [31, 97]}))
        if stdin:
            await socket.send_bytes(stdin)
        await socket.send_str(json.dumps({"eof": True}))
        async for message in socket:
            if message.type is aiohttp.WSMsgType.BINARY:
                parts[message.data[0]] += message.data[1:]
            else:
                return json.loads(message.data)["exit"], parts[1], parts[2]
    raise AssertionError("no exit code came")


async def test_streams_and_the_exit_code_come_back(api: Running, training: tuple[str, dict[str, str]]) -> None:
    job, headers = training
    outcome = await ran(api, job, headers, "sh", "-c", "cat; echo wrong >&2; exit 3", stdin=b"some \x00 bytes")
    assert outcome == (3, b"some \x00 bytes", b"wrong\n")


async def test_malformed_and_long_orders_are_ignored(api: Running, training: tuple[str, dict[str, str]]) -> None:
    """The event loop parses them; 4 MB of brackets, or a list, ended the shell."""
    job, headers = training
    url = f"{api.url}/v1/jobs/{job}/shell"
    async with api.http.ws_connect(url, headers=headers, params=[("word", "cat")], compress=15) as socket:
        assert not socket.compress
        for order in ("[" * 4_000_000, "[" * 900, "[]", "1", '{"resize": 1}', "x", '{"eof": true}'):
            await socket.send_str(order)
        assert json.loads((await socket.receive()).data) == {"exit": 0}


async def test_a_machine_in_a_cloud_that_is_not_configured_is_refused_in_words(
    api: Running, training: tuple[str, dict[str, str]]
) -> None:
    job, headers = training
    api.service.reach = partial(_reach, {})
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await ran(api, job, headers, "true")
    assert refused.value.status == 409


async def test_a_terminal_has_the_size_of_the_client_s(api: Running, training: tuple[str, dict[str, str]]) -> None:
    job, headers = training
    code, out, _ = await ran(api, job, headers, "sh", "-c", "read x; test -t 0 && stty size", tty=True, stdin=b"now\r")
    assert (code, out.splitlines()[-1]) == (0, b"31 97")


@pytest.fixture(autouse=True)
def _hung_up_on_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait long enough after the SIGHUP that no program of a busy machine has to be killed."""
    monkeypatch.setattr("broker.api.http.terminal.HANG_UP_S", 300.0)


@asynccontextmanager
async def hung_up(tmp_path: Path) -> AsyncIterator[list[tuple[str, str]]]:
    """Yield a program that says `up`, and must have been hung up on by the end of the body."""
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    held = os.open(fifo, os.O_RDWR)
    script = f"trap 'echo gone > {fifo}; exit' HUP; echo up; while :; do sleep 0.05; done"
    yield [("word", "sh"), ("word", "-c"), ("word", script)]
    assert (await asyncio.to_thread(select.select, [held], [], [], 300))[0], "it goes on"
    assert os.read(held, 9) == b"gone\n"
    os.close(held)


async def test_a_shell_ends_when_its_client_disconnects(
    api: Running, training: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    job, headers = training
    async with (
        hung_up(tmp_path) as params,
        api.http.ws_connect(f"{api.url}/v1/jobs/{job}/shell", headers=headers, params=params) as socket,
    ):
        assert (await socket.receive()).data == b"\x01up\n"
        await socket.close()


async def test_a_shell_ends_when_its_token_is_revoked(
    api: Running, training: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    job, headers = training
    async with (
        hung_up(tmp_path) as params,
        api.http.ws_connect(f"{api.url}/v1/jobs/{job}/shell", headers=headers, params=params) as socket,
    ):
        assert (await socket.receive()).data == b"\x01up\n"
        await api.revoke("ann")
        assert (await socket.receive(timeout=300)).type is aiohttp.WSMsgType.CLOSE
        assert socket.close_code == aiohttp.WSCloseCode.POLICY_VIOLATION


async def test_a_shell_counts_as_a_stream_of_its_token(
    api: Running, training: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, headers = training
    monkeypatch.setattr(api.app[STREAMS], "_limits", StreamLimits(per_token=1))
    shell = f"/v1/jobs/{job}/shell"
    async with api.http.ws_connect(api.url + shell, headers=headers, params={"word": "cat"}) as socket:
        await socket.send_bytes(b"up")
        assert (await socket.receive()).data == b"\x01up"
        for path in (f"/v1/jobs/{job}/events", f"/v1/jobs/{job}/logs"):
            assert "as many streams open as it may, 1;" in (await api.call("GET", path, headers, 429))["detail"]
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await api.http.ws_connect(api.url + shell, headers=headers, params={"word": "cat"})
        assert (refused.value.status, refused.value.headers and refused.value.headers["Retry-After"]) == (429, "5")
    while api.app[STREAMS].open:  # noqa: ASYNC110  # nothing else tells
        await asyncio.sleep(0.01)
    assert await ran(api, job, headers, "true") == (0, b"", b"")


async def test_a_shell_needs_the_jobs_owner_and_a_running_machine(
    api: Running, training: tuple[str, dict[str, str]]
) -> None:
    job, headers = training
    other, member = await api.token("bob", team="blue"), await api.token("cyd")
    await api.call("GET", f"/v1/jobs/{job}/shell", other, 404)
    assert "secrets" in (await api.call("GET", f"/v1/jobs/{job}/shell", member, 403))["detail"]
    await api.call("GET", f"/v1/jobs/{job}/shell", await api.token("ann", "read"), 403)
    await api.call("GET", f"/v1/jobs/{JobId('a' * 13)}/shell", headers, 404)
    await api.call("GET", f"/v1/jobs/{job}/shell", headers, 422)  # no WebSocket
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        async with api.http.ws_connect(f"{api.url}/v1/jobs/{job}/shell"):
            pass
    assert refused.value.status == 401


async def test_shells_are_counted_by_owner_and_in_all(
    api: Running, training: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, headers = training
    operator = await api.token("eve", "admin", "submit")

    async def opened(of: dict[str, str]) -> aiohttp.ClientWebSocketResponse:
        params = [("word", "cat")]
        return await api.http.ws_connect(f"{api.url}/v1/jobs/{job}/shell", headers=of, params=params)

    async def refusal(of: dict[str, str]) -> str:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await opened(of)
        assert refused.value.status == 429
        return str((await api.call("GET", f"/v1/jobs/{job}/shell", of, 429))["detail"])  # as the client asks for it

    monkeypatch.setattr("broker.api.handlers.shell.SHELLS_OF_ONE", 2)
    monkeypatch.setattr("broker.api.handlers.shell.SHELLS", 3)
    mine = [await opened(headers) for _ in range(2)]
    assert await refusal(headers) == "ann has 2 shells open, which is the most; end one of them"
    theirs = await opened(operator)
    assert await refusal(operator) == "this daemon has 3 shells open, which is the most; try again when one has ended"
    for socket in mine:
        await socket.send_str(json.dumps({"eof": True}))
        while not socket.closed:
            await socket.receive(timeout=300)
    assert await ran(api, job, headers, "true") == (0, b"", b"")
    await theirs.close()

"""Attacks by HTTP bodies, most of them without a token."""

import asyncio
import zlib

from tests.security.abuse.registry import attack
from tests.security.abuse.target import Target, repeated, send_raw

HEAD = "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\n{more}\r\n"
FORM = "application/x-www-form-urlencoded"
REQUESTS = 300
PATHS = (
    ("/v1/jobs", "application/json"),
    ("/v1/uploads?name=a.csv", "application/octet-stream"),
    ("/v1/slack", FORM),
    ("/nowhere", "application/json"),
)


def bomb(unpacked_mib: int, window: int = 31) -> bytes:
    """Return a compressed body of zeros; `window` 31 is gzip, 15 is deflate."""
    packer, zeros = zlib.compressobj(9, zlib.DEFLATED, window), bytes(1024**2)
    return b"".join([*(packer.compress(zeros) for _ in range(unpacked_mib)), packer.flush()])


def _request(path: str, kind: str, body: bytes, *headers: str) -> bytes:
    more = "".join(f"{header}\r\n" for header in (*headers, f"Content-Length: {len(body)}"))
    return HEAD.format(path=path, kind=kind, more=more).encode() + body


@attack
async def compressed_bodies_without_a_token(target: Target, seconds: float) -> None:
    """Send 1 MB that would inflate to 1 GB; the daemon must refuse it before it reads the body."""
    large = await asyncio.to_thread(bomb, 1024)
    requests = [_request(path, kind, large, "Content-Encoding: gzip") for path, kind in PATHS]
    await repeated(seconds, lambda: asyncio.gather(*(send_raw(target, request) for request in requests)))


@attack
async def deflated_chunks_with_a_token(target: Target, seconds: float) -> None:
    large = await asyncio.to_thread(bomb, 512, 15)
    chunks = f"{len(large):x}\r\n".encode() + large + b"\r\n0\r\n\r\n"
    signed = f"Authorization: Bearer {target.attacker}\r\nContent-Encoding: deflate\r\nTransfer-Encoding: chunked\r\n"
    requests = [HEAD.format(path=path, kind=kind, more=signed).encode() + chunks for path, kind in PATHS]
    await repeated(seconds, lambda: asyncio.gather(*(send_raw(target, request) for request in requests)))


@attack
async def endless_bodies_after_a_refusal(target: Target, seconds: float) -> None:
    """Continue to send after a 401, as fast as possible."""
    head = HEAD.format(path="/v1/jobs", kind="application/json", more="Content-Length: 1000000000000\r\n").encode()
    piece = bytes(1024**2)

    async def flood() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", target.port)
        try:
            writer.write(head)
            while True:
                writer.write(piece)
                await writer.drain()
        finally:
            writer.close()

    await repeated(seconds, flood)


@attack
async def bodies_of_very_many_values(target: Target, seconds: float) -> None:
    """Send 4 MB of wrong keys, list items and nested lists, each of which needs an error message."""
    many = 250_000
    bodies = [
        b"{" + b",".join(b'"k%d":1' % i for i in range(many)) + b"}",
        b'{"train":{"kind":"x",' + b",".join(b'"k%d":1' % i for i in range(many)) + b"}}",
        b'{"secrets":[' + b",".join([b'"A"'] * many) + b"]}",
        b'{"labels":{' + b'"a":[[]],' * many + b'"b":1}}',
        b'{"name":' + b"[" * 2_000_000,
        b'{"cap_usd":"' + b"9" * 4_000_000 + b'"}',
        b'{"deadline":"' + b"2" * 4_000_000 + b'"}',
        b'{"' + b"priority" * 400_000 + b'":1}',
    ]
    headers = {"Content-Type": "application/json"}
    await repeated(
        seconds,
        lambda: asyncio.gather(
            *(target.call("POST", "/v1/quotes", target.attacker, data=body, headers=headers) for body in bodies)
        ),
        parallel=1,
    )


@attack
async def slow_bodies(target: Target, seconds: float) -> None:
    """Hold as many requests as a daemon answers at once by one byte of a body each, without and with a token."""
    held: list[asyncio.StreamWriter] = []
    signed = f"Authorization: Bearer {target.attacker}\r\nContent-Length: 100\r\n"
    kinds = (("/v1/slack", FORM, "Content-Length: 100\r\n"), ("/v1/quotes", "application/json", signed))

    async def hold() -> None:
        for path, kind, more in kinds:
            _, writer = await asyncio.open_connection("127.0.0.1", target.port)
            held.append(writer)
            writer.write(HEAD.format(path=path, kind=kind, more=more).encode() + b"{")

    try:
        await asyncio.gather(*(hold() for _ in range(REQUESTS)))
        await asyncio.sleep(seconds)
    finally:
        for writer in held:
            writer.close()


@attack
async def paths_of_very_many_segments(target: Target, seconds: float) -> None:
    """Send 15,000 slashes to the pages and to the API, without a token."""
    heads = [f"{method} {path}{'/' * 15_000} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode()
             for method, path in (("POST", "/ui"), ("GET", "/v1/jobs"))]  # fmt: skip
    await repeated(seconds, lambda: asyncio.gather(*(send_raw(target, head) for head in heads)))

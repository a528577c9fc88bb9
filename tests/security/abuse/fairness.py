"""Attacks that take turns from another team, whose own uploads and quotes must be answered meanwhile."""

import asyncio
import time

from tests.security.abuse.registry import attack
from tests.security.abuse.target import MODEL, Target, repeated, unique
from tests.security.abuse.uploads import costly_parquet

FAIR_S = 20.0
"""Longest time in seconds in which the other team's upload and quote are answered, on a host of two busy cores."""
ROWS = 4000
"""Rows of the other team's file, which is so large that a process of its own parses it."""


@attack
async def many_uploads_while_another_team_quotes(target: Target, seconds: float) -> None:
    """One team sends files of much CPU time, twelve at a time, and quotes. The other team uploads and quotes."""
    costly = await asyncio.to_thread(costly_parquet)
    flood = asyncio.create_task(repeated(seconds, lambda: target.upload(costly, "a.parquet"), parallel=12))
    end = time.monotonic() + seconds
    slowest_s, answered = 0.0, 0
    try:
        while time.monotonic() < end or not answered:
            began = time.monotonic()
            await _upload_and_quote(target)
            slowest_s, answered = max(slowest_s, time.monotonic() - began), answered + 1
    finally:
        flood.cancel()  # uploads that wait for their turn would last for minutes
        await asyncio.gather(flood, return_exceptions=True)
    assert slowest_s < FAIR_S, f"the other team waited {slowest_s:.1f} s"


async def _upload_and_quote(target: Target) -> None:
    """Upload a file and quote a job on it as the other team. Both must succeed."""
    rows = b"word,definition\n" + b"".join(b"w%d,%s\n" % (n, unique().encode()) for n in range(ROWS))
    octets = {"Content-Type": "application/octet-stream"}
    status, upload = await target.call("POST", "/v1/uploads?name=a.csv", target.other, data=rows, headers=octets)
    assert status == 201, upload
    data = {"path": upload["ref"], "prompt": "{word}", "completion": "{definition}"}
    spec = {"name": "q", "cap_usd": "5", "train": {"model": MODEL, "data": data}}
    status, quote = await target.call("POST", "/v1/quotes", target.other, json=spec)
    assert status == 200, quote

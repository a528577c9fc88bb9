"""Attacks by quotes that cost much computation."""

import asyncio
import json
import random
from typing import Any

from tests.security.abuse.registry import attack
from tests.security.abuse.target import MODEL, Target, repeated, unique

LETTERS = [chr(0x4E00 + i) for i in range(200)]


def _columns(count: int, length: int) -> list[str]:
    """Return names that `difflib` takes longest to compare: permutations of the same letters."""
    letters, rng = (LETTERS * (length // len(LETTERS) + 1))[:length], random.Random(1)
    return ["".join(rng.sample(letters, length)) for _ in range(count)]


def _spec(ref: str, **data: Any) -> dict[str, Any]:
    train = {"model": MODEL, "data": {"path": ref, **data}}
    return {"name": "p", "cap_usd": "1", "train": train}


async def _quote(target: Target, spec: dict[str, Any]) -> None:
    await target.call("POST", "/v1/quotes", target.attacker, json=spec)


@attack
async def quotes_with_long_column_names(target: Target, seconds: float) -> None:
    """Send a template whose column resembles 300 long column names of the data."""
    for length in (40, 200, 2000):
        names = _columns(301, length)
        row = json.dumps(dict.fromkeys(names[1:], "x"), ensure_ascii=False).encode() + b"\n"
        status, answer = await target.upload(row, "a.jsonl")
        if status != 201:
            continue
        template = f"{{{names[0]}}}"
        spec = _spec(answer["ref"], prompt=template, completion=template)
        await repeated(seconds / 3, lambda spec=spec: _quote(target, spec))  # type: ignore[misc]


@attack
async def quotes_of_ever_new_specs(target: Target, seconds: float) -> None:
    """Quote specs that all differ in name, length and cap, 20 at a time, so that no cache answers."""
    status, answer = await target.upload(b"word,definition\n" + b"a,b\n" * 100, "words.csv")
    assert status == 201, answer
    rng = random.Random(2)

    async def quote() -> None:
        spec = _spec(answer["ref"], prompt=f"{unique()} {{word}}", completion="{definition}")
        spec["train"] |= {"max_length": rng.randrange(64, 2048), "global_batch": rng.choice((8, 16, 32))}
        await _quote(target, spec)

    await repeated(seconds, quote, parallel=20)


@attack
async def misspelt_names_of_all_kinds(target: Target, seconds: float) -> None:
    """Misspell names wherever the daemon suggests one: keys, accelerators, providers, regions, targets, timezones."""
    status, answer = await target.upload(b"word,definition\n" + b"a,b\n" * 100, "words.csv")
    assert status == 201, answer
    long = "a" * 60_000
    spec = _spec(answer["ref"], prompt="{word}", completion="{definition}")
    spec |= {f"{'priority' * 300}{i}": 1 for i in range(500)}
    names = _spec(answer["ref"], prompt="{word}", completion="{definition}")
    names["resources"] = {"accelerators": [f"a{i}00" for i in range(8)], "providers": ["locla"], "regions": ["us-est"]}
    lora = _spec(answer["ref"], prompt="{word}", completion="{definition}")
    lora["train"]["method"] = {"kind": "lora", "targets": [f"q_porj{i}" for i in range(64)]}
    policy = {"name": "p", "team": "red", "timezone": f"Europe/Berln{long}"}
    calls = [("POST", "/v1/quotes", spec), ("POST", "/v1/quotes", names), ("POST", "/v1/quotes", lora),
             ("PUT", "/v1/policies/p", policy)]  # fmt: skip
    await repeated(
        seconds,
        lambda: asyncio.gather(*(target.call(how, path, target.admin, json=body) for how, path, body in calls)),
    )

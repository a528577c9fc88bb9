"""Bound on the memory that users' files and models take in the daemon."""

import json
from typing import Any

import pytest

from broker.api.core.bounded_cache import BoundedCache, summary_bytes
from broker.preflight import model_lookup
from broker.preflight.model_lookup import HubClient


def summary(columns: int, values: int) -> dict[str, Any]:
    labels = {f"{number:0250d}": number for number in range(values)}
    return {"columns": {f"c{number}": {"values": labels} for number in range(columns)}}


def test_wide_summaries_evict_the_least_recently_used() -> None:
    cache: BoundedCache[str, str] = BoundedCache(64 << 20, 1024)
    size = summary_bytes(summary(60, 1000))
    for number in range(100):
        cache.put(str(number), "x", size)
    assert cache.bytes <= 64 << 20
    assert cache.get("99") == "x"
    assert cache.get("50") is None


def test_a_summary_is_weighed_by_its_distinct_values() -> None:
    wide = summary(60, 1000)
    assert summary_bytes(wide) >= len(json.dumps(wide))
    assert summary_bytes(None) < summary_bytes(summary(1, 0)) < 20_000


def test_a_repeated_key_is_counted_once() -> None:
    cache: BoundedCache[str, int] = BoundedCache(100, 2)
    for number in range(5):
        cache.put("a", number, 60)
    assert (cache.get("a"), cache.bytes) == (4, 60)


def test_a_value_beyond_the_bound_evicts_no_other_value() -> None:
    cache: BoundedCache[str, int] = BoundedCache(100, 2)
    cache.put("a", 1, 60)
    cache.put("b", 2, 101)
    assert (cache.get("a"), cache.get("b"), cache.bytes) == (1, None, 60)
    cache.put("a", 3, 101)  # the old value is not the key's value any more
    assert (cache.get("a"), cache.bytes) == (None, 0)


async def test_configs_of_ever_new_models_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any tenant may name any number of the Hub's models, each with a config of up to 1 MB."""
    hub, asked = HubClient(), []
    body = json.dumps({"model_type": "x" * 900_000}).encode()

    async def answer(model: str, file: str, revision: str) -> tuple[int, bytes]:
        asked.append(model)
        return 200, body

    monkeypatch.setattr(hub, "_get", answer)
    for number in range(50):
        await hub.config(f"owner/m{number}")
    await hub.config("owner/m49")
    assert len(asked) == 50
    held = sum(size for _, size in hub._cache.values())
    assert 0 < held <= model_lookup.CACHED_BYTES

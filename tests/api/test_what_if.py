"""`POST /v1/what-if`: memory and scaling without a data set, faults by field, and no work on the event loop."""

import threading
from typing import Any

import pytest

from broker.api.schemas.quotes import WhatIfRequest
from broker.client.async_client import AsyncClient
from broker.daemon import preflight_adapter
from broker.runtime.cpu_threads import CpuThreads
from tests.api.harness import MODEL, Running

TIMEOUT_S = 30.0


async def test_the_answer_has_memory_speed_and_dollars_by_number_of_gpus(api: Running) -> None:
    token = (await api.token("ada", "read"))["Authorization"].removeprefix("Bearer ")
    async with AsyncClient(api.url, token) as client:
        asked = {"model": MODEL, "gpu": "l40s", "gpus": [1, 8], "rows": 80_000, "usd_per_gpu_hour": "0.5"}
        found = await client.what_if(asked)
    one, eight = found.points
    assert (found.gpu, found.global_batch, found.steps) == ("l40s", 8, 10_000)
    assert sum(one.memory_bytes.values()) == one.need_bytes <= found.gpu_memory_bytes
    assert one.tokens_per_s is not None
    assert eight.tokens_per_s is not None
    assert eight.tokens_per_s > one.tokens_per_s
    assert one.hours is not None
    assert float(one.usd or 0) == pytest.approx(one.hours * 0.5, abs=1e-3)


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"model": "/etc"}, "model", "not in the bundled catalogue"),
        ({"model": "HuggingFaceTB/SmolLM2-135"}, "model", "the nearest is HuggingFaceTB/SmolLM2-135M"),
        ({"model": "openai/whisper-small"}, "model", "no basis"),
        ({"gpu": "tpu"}, "gpu", "tpu: not known"),
        ({"gpus": [8, 1]}, "gpus", "ascending"),
        ({"max_length": 900_000}, "max_length", "900000: the model has"),
        ({"gpus": [513]}, "gpus.0", "512"),
    ],
)
async def test_a_fault_names_the_field(api: Running, change: dict[str, Any], field: str, words: str) -> None:
    body = {"model": MODEL, "gpus": [1]} | change
    answer = await api.call("POST", "/v1/what-if", await api.token("ada", "read"), 422, json=body)
    (fault,) = answer["errors"]
    assert fault["field"] == field
    assert words in fault["message"]
    assert "--" not in fault["message"]


async def test_the_estimate_runs_in_a_thread_with_a_deadline(api: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def slow(request: WhatIfRequest) -> Any:
        release.wait(TIMEOUT_S)

    monkeypatch.setattr(preflight_adapter, "answer_what_if", slow)
    monkeypatch.setattr(api.service.quotes, "threads", CpuThreads(deadline_s=0.2))
    try:
        me = await api.token("ada", "read")
        await api.call("POST", "/v1/what-if", me, 503, json={"model": MODEL})
        await api.call("GET", "/v1/me", me, 200)
    finally:
        release.set()

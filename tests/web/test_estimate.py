"""The page Estimate: memory by category, scaling, faults next to their fields, and its pure parts."""

import json
import re
from decimal import Decimal
from html import unescape
from typing import Any

import pytest

from broker.api.schemas.quotes import WhatIfRequest
from broker.daemon.what_if_adapter import answer_what_if
from broker.web.estimate_view import scaling_summary
from tests.api.harness import MODEL
from tests.web.visitor import Visitor

MISTRAL = "mistralai/Mistral-7B-v0.1"


async def test_the_page_shows_memory_speed_time_and_dollars(ada: Visitor) -> None:
    page = (await ada.get(f"/ui/estimate?model={MISTRAL}&method=full&rows=100000&usd_per_gpu_hour=2.10")).text
    assert "does not fit" in page
    for shown in ("fits on <b>2 GPUs</b>", "optimizer: ", "fsdp on 8", "$ of an epoch", "costs least on"):
        assert shown in page, shown
    plot = json.loads(unescape(re.findall(r'data-scaling="([^"]*)"', page)[0]))
    assert plot["gpus"] == [2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert plot["linear"][1] == pytest.approx(2 * plot["rate"][0])


async def test_without_a_model_the_page_says_what_to_do(ada: Visitor) -> None:
    page = (await ada.get("/ui/estimate")).text
    assert "Give a model and a kind of GPU" in page
    assert f'<option value="{MODEL}">' in page
    assert "uPlot" not in page


@pytest.mark.parametrize(
    ("query", "field", "words"),
    [
        ("model=x%3Cscript%3E", "model", "not in the bundled catalogue"),
        (f"model={MODEL}&gpu=tpu", "gpu", "not known"),
        (f"model={MODEL}&gpus=1,many", "gpus", "integer"),
        (f"model={MODEL}&gpus=8,1", "gpus", "ascending"),
        (f"model={MODEL}&rows=-1", "rows", "greater than or equal to 1"),
        (f"model={MODEL}&max_length=900000", "max_length", "the model has"),
        (f"model={MODEL}&usd_per_gpu_hour=NaN", "usd_per_gpu_hour", ""),
        (f"model={MODEL}&rows={'9' * 5000}", "rows", "integer"),
    ],
)
async def test_a_fault_is_shown_next_to_its_field(ada: Visitor, query: str, field: str, words: str) -> None:
    answer = await ada.get(f"/ui/estimate?{query}")
    assert answer.status == 422
    (line,) = re.findall(rf'id="fault-{field}" role="alert">([^<]*)<', answer.text)
    assert line
    assert words in line
    assert "No estimate yet: a field needs another value" in answer.text
    assert "<script>" not in answer.text


def summary(**changes: Any) -> Any:
    return scaling_summary(answer_what_if(WhatIfRequest.model_validate({"model": MISTRAL, "gpus": (1, 8)} | changes)))


def test_the_two_best_rows_need_hours_and_dollars() -> None:
    untimed, timed = summary(), summary(rows=80_000)
    assert (untimed.quickest, untimed.cheapest, timed.cheapest) == (None, None, None)
    assert timed.quickest.gpus == 8
    priced = summary(rows=80_000, usd_per_gpu_hour=Decimal(2))
    assert priced.cheapest.usd == min(row.point.usd for row in priced.rows)


def test_bars_end_at_the_card_and_nothing_that_fits_has_no_plot() -> None:
    found = summary(method="full", gpus=(1,), gpu="l4")
    assert (found.fewest, found.plot, found.rows[0].plan) == (None, "", "does not fit")
    assert sum(part.width for part in found.rows[0].parts) == pytest.approx(100, abs=0.01)


def test_idle_gpus_and_recomputing_are_named_in_the_plan() -> None:
    (row,) = summary(gpus=(8,), global_batch=2).rows
    assert row.plan.startswith("ddp on 2 of 8: 1 × 1")
    assert any("recomputing" in row.plan for row in summary(method="full", gpus=(2,), global_batch=512).rows)

"""Effect of more GPUs, by the estimators."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.domain.workload import Plan
from broker.estimator.memory import estimate as sizes
from broker.estimator.memory.device_overhead import CONTEXT
from broker.estimator.planning.scaling import Point, TrainingLoad, _needed, counts_of, run_of, scaling
from broker.estimator.speed.hardware import TABLE
from broker.estimator.speed.roofline import model_flop
from tests.support.machines import LLAMA_3_8B, MISTRAL_7B

LOAD = TrainingLoad(global_batch=512, tokens_per_row=2048, steps=100, usd_per_gpu_hour=2.0)
H100 = TABLE["h100-sxm"]
EVERY = (1, 2, 4, 8, 16, 64, 512)


def table(counts: tuple[int, ...] = EVERY, load: TrainingLoad = LOAD, **ask: object) -> dict[int, Point]:
    points = scaling(LLAMA_3_8B, replace(sizes.EstimateOptions(length=2048), **ask), H100, counts, load)  # type: ignore[arg-type]
    return {point.gpus: point for point in points}


def test_full_training_fits_where_it_is_divided_among_enough() -> None:
    found = table(method="full")
    assert (found[1].plan, found[1].speed, found[1].usd) == (None, None, None)
    assert found[1].need_bytes > H100.memory_bytes
    eight = found[8]
    assert eight.plan is not None
    assert eight.speed is not None
    assert (eight.plan.parallelism, eight.nodes) == ("fsdp", 1)
    assert eight.need_bytes <= H100.memory_bytes
    assert eight.usd == pytest.approx(eight.hours * 8 * 2.0)
    assert eight.hours == pytest.approx(100 * 512 * 2048 / eight.speed.tokens_per_s / 3600)


def test_a_model_is_divided_only_where_it_must_be_and_can_be() -> None:
    for method, several in (("lora", {"ddp"}), ("qlora", {"ddp"}), ("full", {"fsdp", "hybrid"})):
        plans = [point.plan for point in table(method=method).values() if point.plan and point.plan.devices > 1]
        assert {plan.parallelism for plan in plans} <= several
        assert plans


def test_ddp_over_machines_needs_what_its_plan_estimates() -> None:
    """Gradients that machines have summed are kept as well while micro-batches accumulate."""
    points = table((16, 32, 64), replace(LOAD, global_batch=1024), method="full").values()
    hybrids = [point for point in points if point.plan and point.plan.parallelism == "hybrid"]
    assert hybrids
    for point in hybrids:
        assert point.plan
        ask = sizes.EstimateOptions(
            method="full", length=2048, rows=point.plan.micro_batch, accumulated=point.plan.accumulation > 1,
            checkpointing=point.plan.gradient_checkpointing, gpus=point.plan.devices, nodes=point.nodes,
            sharding="hybrid",
        )  # fmt: skip
        alone = sizes.estimate(LLAMA_3_8B, ask)
        assert point.need_bytes == int(alone.peak_allocated * (1 + alone.margin)) + CONTEXT


def test_a_point_does_not_depend_on_the_points_before_it() -> None:
    counts = (2, 4, 8, 16, 64)
    found = table(counts, method="full")
    assert table(counts[::-1], method="full") == found
    assert {count: table((count,), method="full")[count] for count in counts} == found


def test_other_steps_prices_and_gpus_share_memory_estimates() -> None:
    first = table(method="full")
    misses = _needed.cache_info().misses
    again = table(method="full", load=replace(LOAD, steps=7, usd_per_gpu_hour=3.0))
    assert _needed.cache_info().misses == misses
    assert [point.memory for point in again.values()] == [point.memory for point in first.values()]


def test_throughput_grows_and_utilisation_falls_with_gpus() -> None:
    points = [p for p in table(method="full").values() if p.plan]
    rates = [p.speed.tokens_per_s for p in points if p.speed]
    assert rates == sorted(rates)
    assert all(0.1 < p.mfu < 0.7 for p in points)
    assert points[-1].mfu < max(p.mfu for p in points)


def test_gpus_that_the_global_batch_does_not_divide_among_stay_idle() -> None:
    found = table((3, 512), replace(LOAD, global_batch=8, usd_per_gpu_hour=None))
    assert [p.plan.devices for p in found.values() if p.plan] == [2, 8]
    assert found[512].usd is None


def test_idle_gpus_put_no_network_between_the_others() -> None:
    eight, most = table((8, 64), replace(LOAD, global_batch=8), method="full").values()
    assert (eight.plan, eight.nodes, eight.speed) == (most.plan, most.nodes, most.speed)
    assert most.nodes == 1
    (odd,) = table((9,), replace(LOAD, global_batch=9), method="full").values()
    assert odd.plan is not None
    assert (odd.nodes, odd.plan.devices, odd.plan.parallelism) == (2, 9, "fsdp"), (
        "two machines cannot have as many each"
    )


def test_arithmetic_of_a_token_is_six_times_the_weights_and_attention() -> None:
    ask, plan = sizes.EstimateOptions(method="full", length=2048), Plan(micro_batch=1, gradient_checkpointing=True)
    run = run_of(MISTRAL_7B, ask, plan, 2048)
    embedding = MISTRAL_7B.vocabulary * MISTRAL_7B.hidden
    weights = 6 * (MISTRAL_7B.parameters - embedding)
    scores = 6 * MISTRAL_7B.layers * MISTRAL_7B.hidden * 2048
    assert model_flop(run) == pytest.approx(weights + scores, rel=0.001)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        ({"method": "adapter", "trainable": 9}, "no basis: no run of such an adapter"),
        ({"length": 0}, "--seq 0: must be at least 1"),
    ],
)
def test_unanswerable_scaling_questions_are_refused(ask: dict[str, object], words: str) -> None:
    with pytest.raises(sizes.InvalidEstimate, match=re.escape(words)):
        table(**ask)


def test_a_mixture_of_experts_scales_within_a_wide_interval() -> None:
    mixture = replace(MISTRAL_7B, experts=8, active_experts=2)
    (point,) = scaling(mixture, sizes.EstimateOptions(), H100, (1,), LOAD)
    assert point.speed is not None
    assert point.speed.spread**2 > 1.9


@pytest.mark.parametrize(
    ("said", "counts"),
    [
        ("gpus=1", (1,)),
        ("1,2,4,8", (1, 2, 4, 8)),
        ("8, ..., 32", (8, 16, 32)),
        ("gpus=1,2,4,8,…,512", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)),
        ("gpus=1, 3,...,27", (1, 3, 9, 27)),
        ("gpus=8,…,48", (8, 16, 32, 48)),
    ],
)
def test_gpu_counts_are_parsed_from_text(said: str, counts: tuple[int, ...]) -> None:
    assert counts_of(said) == counts


@pytest.mark.parametrize(
    "said",
    [
        "gpus",
        "nodes=1,2",
        "gpus=",
        "gpus=0",
        "gpus=a",
        "gpus=2,1",
        "gpus=1,1",
        "gpus=1,…",
        "gpus=1,,2",
        "gpus=99999",
        "",
        "1;2",
    ],
)
def test_counts_that_make_no_sense_are_named(said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"--what-if {said}: ")):
        counts_of(said)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([name for name, h in TABLE.items() if h.gpu]),
    st.sampled_from(["full", "lora", "qlora"]),
    st.sampled_from([256, 4096]),
)
def test_more_gpus_never_train_slower_where_each_has_rows_enough(gpu: str, method: str, length: int) -> None:
    ask = sizes.EstimateOptions(method=method, length=length)  # type: ignore[arg-type]
    load = TrainingLoad(global_batch=512, tokens_per_row=length, steps=1)
    points = scaling(LLAMA_3_8B, ask, TABLE[gpu], (1, 2, 4, 8), load)
    rates = [p.speed.tokens_per_s for p in points if p.speed]
    assert all(more >= 0.98 * fewer for fewer, more in pairwise(rates))

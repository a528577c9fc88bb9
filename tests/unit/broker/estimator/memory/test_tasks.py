"""Jobs that are not next-token training of a dense decoder: what of them is counted, and how little of it is known."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.offer import OfferVerdict
from broker.domain.workload import ModelShape, Plan, Workload
from broker.estimator.planning.plan_search import Planner
from broker.estimator.speed.calibration import SPREAD_COUNTED, SPREAD_CPU, SPREAD_MIXTURE, SPREAD_UNMEASURED
from broker.estimator.speed.hardware import TABLE
from broker.estimator.speed.roofline import ideal, model_flop
from broker.estimator.speed.throughput import Speed, run_of, speed, step_seconds, timing
from broker.estimator.workload import workload
from broker.model_catalog import catalog as catalogue
from broker.model_catalog.task_shape import task_shape
from broker.preflight.dataset import rows_of, summarise
from tests.support.machines import LLAMA_3_8B, LONG, WORK, offer, quoted, spec
from trainer.contract.train import TrainConfig

A100 = TABLE["a100-80gb-sxm"]
ONE = Plan(micro_batch=1, accumulation=8)


def shape_of(name: str, task: str) -> ModelShape:
    found = catalogue.find(name)
    assert found is not None
    shape = task_shape(name, found.config, task)
    assert shape is not None
    return shape


MIXTRAL = shape_of("mistralai/Mixtral-8x7B-v0.1", "causal_lm")
BERT = shape_of("google-bert/bert-base-uncased", "text_classification")
VIT = shape_of("google/vit-base-patch16-224", "image_classification")
REWARD = shape_of("meta-llama/Llama-3.1-8B", "reward_model")
FULL = replace(WORK, method="full", gradient_checkpointing=False)


def matmul_flop(work: Workload, shape: ModelShape) -> float:
    """Return the FLOP in matrix products per token of one step."""
    run = run_of(replace(work, shape=shape), shape, A100)
    return ideal(run, A100).matmul * A100.matmul_flops / (run.tokens * run.micro_batches)


def test_a_token_of_a_mixture_costs_its_active_experts() -> None:
    """12.9 of 46.7 billion parameters, as its owner says; the table of words is in no product."""
    active = 12.88e9 - MIXTRAL.vocabulary * MIXTRAL.hidden
    assert matmul_flop(FULL, MIXTRAL) == pytest.approx(6 * active, rel=0.01)


def test_an_encoder_makes_no_words() -> None:
    """Six FLOP for each weight of its layers and token, and all tokens see each other."""
    layers = 12 * (4 * 768**2 + 2 * 768 * 3072)
    assert matmul_flop(FULL, BERT) == pytest.approx(6 * layers, rel=1e-6)
    run = run_of(replace(FULL, shape=BERT), BERT, A100)
    causal = replace(run, shape=replace(BERT, family="gpt2"))
    assert ideal(run, A100).attention == pytest.approx(2 * ideal(causal, A100).attention)
    assert model_flop(run) > 6 * layers
    tags = replace(BERT, head="words", labels=9)
    assert matmul_flop(FULL, tags) == pytest.approx(6 * (layers + 9 * 768), rel=1e-6)


def test_a_pictures_patches_are_its_tokens() -> None:
    layers, patches = 12 * (4 * 768**2 + 2 * 768 * 3072), 768 * 768
    assert matmul_flop(FULL, VIT) == pytest.approx(6 * (layers + patches), rel=1e-6)
    train = TrainConfig.model_validate(
        {"task": "text_classification", "model": "m", "data": {"path": "a.csv", "prompt": "{x}", "label": "y"}}
    )
    rows = rows_of(train, summarise(json.dumps([{"x": "a", "y": "b"}, {"x": "c", "y": "d"}]).encode(), "json"))
    made = workload(spec(train=train.model_dump()), VIT, rows)
    assert (made.sequence, made.tokens_per_row, made.counted_per_row) == (197, 197.0, 1.0)


def test_a_head_of_few_numbers_saves_the_vocabularys_products() -> None:
    spared = matmul_flop(FULL, LLAMA_3_8B) - matmul_flop(FULL, REWARD)
    assert spared == pytest.approx(6 * 128256 * 4096, rel=1e-6)


DPO = replace(WORK, task="dpo", sequences=2, reference=True)


def test_a_preference_is_two_sequences_and_a_reference_pass() -> None:
    """LoRA: two products a weight, three with the reference's, of twice as many tokens."""
    bare = replace(WORK, lora_targets="attention", gradient_checkpointing=False)
    plain, paired = (run_of(w, LLAMA_3_8B, A100) for w in (bare, replace(bare, sequences=2, reference=True)))
    adapters = 2 * 3 * 16 * 32 * 2 * (4096 + 4096 + 4096 + 1024)
    flop = [ideal(r, A100).matmul * A100.matmul_flops / r.micro_batches for r in (plain, paired)]
    base = [f - adapters * r.tokens for f, r in zip(flop, (plain, paired), strict=True)]
    assert base[1] == pytest.approx(2 * 1.5 * base[0], rel=0.02)
    assert step_seconds(paired, A100) < 3 * step_seconds(plain, A100)


def test_an_evaluation_of_preferences_has_two_passes() -> None:
    one, two = (timing(run_of(w, LLAMA_3_8B, A100), A100) for w in (WORK, replace(WORK, reference=True)))
    assert two.evaluated_s == pytest.approx(2 * one.evaluated_s, rel=0.1)


def test_both_sequences_of_a_preference_are_in_memory_at_once() -> None:
    pair, rows = (
        Planner(DPO).need(ONE, A100),
        Planner(replace(WORK, global_batch=16)).need(Plan(micro_batch=2, accumulation=8), A100),
    )
    assert pair.peak == rows.peak


PAIRS = {"task": "dpo", "data": {"path": "a.csv", "prompt": "{p}", "chosen": "{c}", "rejected": "{r}"}}
ROWS = [{"p": "x" * 360, "c": "y" * 36, "r": "z" * 720}] * 4


def made(train: dict[str, Any], shape: ModelShape | None = None, rows: Sequence[Mapping[str, Any]] = ROWS) -> Workload:
    config = TrainConfig.model_validate({"model": "m", "global_batch": 2, "max_length": 2048, **train})
    return workload(
        spec(train=config.model_dump()), shape, rows_of(config, summarise(json.dumps(rows).encode(), "json"))
    )


def test_a_preferences_rows_are_the_prompt_with_each_answer() -> None:
    found = made(PAIRS)
    assert (found.task, found.sequences, found.reference) == ("dpo", 2, True)
    assert found.tokens_per_row == pytest.approx((396 + 1080) / 2 / 3.6)
    assert found.sequence == 450, "of the longer: 1080 bytes / 2.4"
    assert found.counted_per_row == pytest.approx(1476 / 3.6)


def test_orpo_has_no_reference_and_kto_three_passes_of_one_sequence() -> None:
    pair = made(PAIRS | {"task": "orpo"})
    assert (pair.task, pair.sequences, pair.reference) == ("orpo", 2, 0)
    data = {"path": "a.csv", "prompt": "{p}", "completion": "{c}", "label": "good"}
    rated = made({"task": "kto", "data": data}, rows=[{**row, "good": n % 2 == 0} for n, row in enumerate(ROWS)])
    assert (rated.task, rated.sequences, rated.reference) == ("kto", 1, 3)
    assert rated.tokens_per_row == pytest.approx(396 / 3.6)
    plain, judged = (timing(run_of(w, LLAMA_3_8B, A100), A100) for w in (WORK, replace(WORK, reference=3)))
    assert judged.evaluated_s == pytest.approx(4 * plain.evaluated_s, rel=0.1)


def test_encoder_and_decoder_tokens_are_counted_separately() -> None:
    found = made({"task": "seq2seq", "data": {"path": "a.csv", "prompt": "{p}", "completion": "{r}"}})
    assert (found.sequence, found.target_tokens) == (150, 300)
    assert (found.tokens_per_row, found.target_tokens_per_row) == (100, 200)
    assert (found.counted_per_row, found.unestimated) == (300, "task seq2seq of such a model")


def test_the_less_is_known_the_wider_the_interval() -> None:
    def at(work: Workload, shape: ModelShape, devices: int = 1, gpu: str = "a100-80gb-sxm") -> Speed:
        return speed(run_of(work, shape, TABLE[gpu], devices=devices), TABLE[gpu])

    assert at(LONG, BERT).spread == at(LONG, VIT).spread == SPREAD_COUNTED
    assert "an encoder counted, none was measured" in at(LONG, BERT).evidence
    assert "a decoder with such a head" in at(LONG, REWARD).evidence
    assert (at(LONG, MIXTRAL).spread, at(LONG, MIXTRAL).tier) == (SPREAD_MIXTURE, "transferred")
    assert at(LONG, MIXTRAL, devices=8).spread == at(LONG, MIXTRAL, gpu="l4").spread == SPREAD_COUNTED
    preferences = at(replace(LONG, task="dpo", sequences=2, reference=True), LLAMA_3_8B)
    assert preferences.spread == SPREAD_UNMEASURED
    assert "none with a reference" in preferences.evidence


@pytest.mark.parametrize("shape", [BERT, VIT, REWARD, MIXTRAL], ids=lambda s: s.name)
def test_every_task_gets_hours_and_dollars(shape: ModelShape) -> None:
    work = replace(WORK, shape=shape, sequence=min(512, shape.max_positions or 512), tokens_per_row=100.0)
    (line,) = quoted([offer(gpu_memory_bytes=192 * 1024**3)], work=work).lines
    assert line.verdict is OfferVerdict.KEPT, line.reason
    assert line.usd_p90 is not None
    assert line.usd_p50 is not None
    assert line.usd_p90 > line.usd_p50 > 0
    assert line.evidence


@given(st.integers(1, 8), st.integers(1, 8))
def test_more_active_experts_never_take_less_time(some: int, more: int) -> None:
    few, many = (
        replace(MIXTRAL, active_experts=n) for n in (min(some, more), max(some, more))
    )  # fmt: skip
    assert step_seconds(run_of(WORK, few, A100), A100) <= step_seconds(run_of(WORK, many, A100), A100) * (1 + 1e-12)


T5 = shape_of("google-t5/t5-base", "seq2seq")


def test_input_runs_through_the_encoder_and_output_through_the_decoder() -> None:
    """Six FLOP a weight: keys and values of the cross attention are made of what was read."""
    work = replace(FULL, shape=T5, tokens_per_row=300.0, target_tokens=100, target_tokens_per_row=100.0)
    run = run_of(work, T5, A100)
    attention, mlp = 768 * 768, 2 * 768 * 3072
    read = 12 * (4 * attention + mlp) + 12 * 2 * attention
    written = 12 * (6 * attention + mlp) + 768 * 32128
    flop = ideal(run, A100).matmul * A100.matmul_flops / run.micro_batches
    assert flop == pytest.approx(6 * (300 * read + 100 * written), rel=1e-6)
    longer = run_of(replace(work, target_tokens_per_row=200.0), T5, A100)
    assert step_seconds(longer, A100) > step_seconds(run, A100)
    assert speed(replace(run, tokens=1e6, target_tokens=1e6), A100).spread == SPREAD_COUNTED
    assert "an encoder-decoder counted" in speed(run, A100).evidence


def test_an_encoder_decoder_is_quoted() -> None:
    data = {"path": "a.csv", "prompt": "{p}", "completion": "{r}"}
    work = made({"task": "seq2seq", "data": data}, T5)
    assert work.unestimated == ""
    (line,) = quoted([offer()], work=work).lines
    assert line.verdict is OfferVerdict.KEPT, line.reason
    assert line.usd_p50
    assert line.memory is not None
    more = quoted([offer()], work=replace(work, target_tokens=4 * work.target_tokens)).lines[0]
    assert more.memory is not None
    assert more.memory.required > line.memory.required


def test_a_cpu_has_its_own_interval_for_every_task() -> None:
    cpu = TABLE["cpu"]
    assert speed(run_of(WORK, BERT, cpu), cpu).spread == SPREAD_CPU

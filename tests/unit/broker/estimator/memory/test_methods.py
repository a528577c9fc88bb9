"""Effects of a spec's method and switches on memory, time and plans."""

from dataclasses import replace
from typing import Any

import pytest

from broker.domain.offer import GIB
from broker.domain.workload import MemoryNeed, Workload
from broker.estimator.architecture.model_states import trained_parameters
from broker.estimator.memory.estimate import EstimateOptions, estimate
from broker.estimator.memory.job_memory import bits_of, memory, numerics_of
from broker.estimator.planning.corrections import memory_key
from broker.estimator.speed.hardware import TABLE
from broker.estimator.speed.throughput import run_of, speed, step_seconds
from broker.estimator.workload import Rows, workload
from tests.support.machines import LLAMA_3_8B, LONG, WORK, spec

ROWS = Rows(count=938, tokens_mean=71.0, tokens_longest=300)
QLORA = {"kind": "qlora"}
H100 = TABLE["h100-sxm"]


def of(**train: Any) -> Workload:
    return workload(spec(train=train), LLAMA_3_8B, ROWS)


def need(work: Workload) -> MemoryNeed:
    found = memory(work, bf16=True, gpu=True)
    assert found is not None
    return found


def trained(work: Workload) -> int:
    return trained_parameters(LLAMA_3_8B, numerics_of(work, LLAMA_3_8B, bf16=True, gpu=True))


def test_a_qlora_job_is_quoted_as_one() -> None:
    """The weights equal those of `estimate --method qlora`, slightly more than a quarter of a LoRA's bf16 weights."""
    four, eight, plain = of(method=QLORA), of(method=QLORA | {"bits": 8}), of()
    assert [w.method for w in (four, eight, plain)] == ["qlora", "lora8", "lora"]
    assert [bits_of(w) for w in (four, eight, plain)] == [4, 8, 0]
    assert need(four).weights < need(eight).weights < need(plain).weights
    asked = estimate(LLAMA_3_8B, EstimateOptions(method="qlora", length=300, rows=4))
    assert need(four).weights == asked.by_category["weights"]
    assert need(four).weights / GIB < 6
    long = (replace(w, tokens_per_row=16_000.0) for w in (plain, four))
    seconds = [step_seconds(run_of(w, LLAMA_3_8B, H100), H100) for w in long]
    assert seconds[0] < seconds[1], "the base is unpacked for each use"


def test_half_of_what_computes_in_float32_is_still_quantised() -> None:
    older = memory(of(method=QLORA, precision="fp32"), bf16=False, gpu=True)
    assert older is not None
    assert need(of(method=QLORA)).weights < older.weights < need(of()).weights


def test_targets_by_name_are_counted_by_their_last_part() -> None:
    some = of(method=QLORA | {"targets": ["self_attn.q_proj", "v_proj"]})
    assert some.lora_targets == "self_attn.q_proj,v_proj"
    assert trained(some) == 32 * 16 * (4096 + 4096 + 4096 + 1024)


@pytest.mark.parametrize(
    ("train", "optimizer", "moments"),
    [
        ({}, "adamw_fused", 8.0),
        ({"optim": {"name": "adamw_8bit"}}, "adamw_8bit", 2.03),
        ({"optim": {"name": "adafactor"}}, "adafactor", 0.0),
        ({"optim": {"name": "sgd", "lr": 0.1}}, "sgd", 0.0),
    ],
)
def test_the_optimizer_says_how_many_bytes_a_trained_weight_takes(
    train: dict[str, Any], optimizer: str, moments: float
) -> None:
    work = of(**train)
    assert work.optimizer == optimizer
    assert need(work).optimizer / trained(work) == pytest.approx(moments, abs=0.01)
    run = run_of(work, LLAMA_3_8B, H100)
    assert run.optimizer == optimizer


@pytest.mark.parametrize(
    ("changes", "margin", "words"),
    [
        ({}, 0.05, "equals a trace"),
        ({"method": "qlora"}, 0.10, "llama with qlora: by formula"),
        ({"optimizer": "sgd", "attention": "eager"}, 0.10, "llama with sgd, eager: by formula"),
        ({"method": "qlora", "shape": replace(LLAMA_3_8B, family="mamba", known=False)}, 1.4, "is unknown"),
    ],
)
def test_untraced_methods_have_a_wider_margin(changes: dict[str, Any], margin: float, words: str) -> None:
    found = need(replace(WORK, **changes))
    assert found.margin == margin
    assert words in found.source


def test_eager_attention_keeps_every_score() -> None:
    assert of(attention="auto").attention == of(attention="sdpa").attention == "sdpa"
    assert need(of(attention="eager")).activations > 1.2 * need(of()).activations


def test_the_time_of_an_8_bit_base_is_a_guess_and_says_so() -> None:
    at = speed(run_of(replace(LONG, method="lora8"), LLAMA_3_8B, H100), H100)
    assert (at.spread, at.tier) == (2, "unchecked")
    assert "8-bit base" in at.evidence


def test_dora_is_not_estimated() -> None:
    work = of(method={"kind": "lora", "dora": True})
    assert (work.shape, work.unestimated, work.method) == (None, "DoRA", "lora")


def test_runs_with_other_states_say_nothing_of_each_other() -> None:
    found = {memory_key(of(**train))[0] for train in ({}, {"method": QLORA}, {"optim": {"name": "sgd", "lr": 0.1}})}
    assert len(found) == 3

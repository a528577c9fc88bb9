"""The terms of a step: their components, and the direction in which each may move."""

from dataclasses import fields, replace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import FAMILIES, Numerics, family_spec
from broker.estimator.architecture.model_states import STATES
from broker.estimator.memory.estimate import ATTENTIONS
from broker.estimator.speed.calibration import FITTED, Calibration
from broker.estimator.speed.hardware import TABLE, Hardware
from broker.estimator.speed.memory_traffic import layer_bytes, optimizer_bytes, weight_bytes
from broker.estimator.speed.roofline import RooflineStep, Terms, ideal, terms
from tests.support.machines import LLAMA_3_8B

A100 = TABLE["a100-80gb-sxm"]
FULL = Numerics(weight=2, trained=4, compute=2, full=True)
RATES = ("matmul_flops", "attention_flops", "fp32_flops", "bandwidth", "link", "network")
ALIKE = Calibration(**{f.name: getattr(FITTED, f.name) for f in fields(FITTED)} | {"matmul": {}, "attention": {}})


def lora(**changes: Any) -> Numerics:
    base = Numerics(
        weight=2,
        trained=4,
        compute=2,
        full=False,
        autocast=True,
        rank=16,
        adapted=frozenset(family_spec(LLAMA_3_8B).names),
    )
    return replace(base, **changes)


def run(**changes: Any) -> RooflineStep:
    base = RooflineStep(shape=LLAMA_3_8B, numerics=FULL, tokens=8192, length=2048, trained=LLAMA_3_8B.parameters)
    return replace(base, **changes)


def of(what: RooflineStep, hardware: Hardware = A100) -> Terms:
    return terms(ideal(what, hardware), ALIKE)


runs = st.builds(
    RooflineStep,
    shape=st.sampled_from([replace(LLAMA_3_8B, family=family) for family in [*FAMILIES, "unheard-of"]]),
    numerics=st.sampled_from([FULL, replace(FULL, weight=4, autocast=True), replace(FULL, weight=4, compute=4), lora(),
                              lora(autocast=False, dropout=False), lora(bits=4, norms_float32=True), lora(bits=8),
                              lora(attention="eager"), lora(weight=4, compute=4, autocast=False)]),
    tokens=st.floats(1, 65536),
    length=st.floats(1, 32768),
    trained=st.integers(1, 8 * 10**9),
    micro_batches=st.floats(1, 64),
    recompute=st.sampled_from(["none", "early", "whole"]),
    optimizer=st.sampled_from(sorted(STATES)),
    fused=st.booleans(),
    devices=st.sampled_from([1, 2, 8, 16, 64]),
    sharding=st.sampled_from(["none", "ddp", "fsdp"]),
)  # fmt: skip


@given(runs, st.floats(1, 1e5), st.integers(1, 8))
def test_more_tokens_never_take_less_time(what: RooflineStep, more: float, nodes: int) -> None:
    here = replace(what, nodes=min(nodes, what.devices))
    least = of(here).total * (1 - 1e-12)
    assert of(replace(here, tokens=here.tokens + more)).total >= least
    assert of(replace(here, length=here.length + more)).total >= least
    assert of(replace(here, micro_batches=here.micro_batches + more)).total >= least


@given(runs, st.sampled_from(list(TABLE.values())), st.tuples(*[st.floats(1, 100)] * len(RATES)), st.integers(1, 8))
def test_a_gpu_that_is_faster_in_all_is_never_slower(
    what: RooflineStep, slower: Hardware, times: tuple[float, ...], nodes: int
) -> None:
    here = replace(what, nodes=min(nodes, what.devices))
    rates: dict[str, Any] = {name: getattr(slower, name) * by for name, by in zip(RATES, times, strict=True)}
    assert of(here, replace(slower, **rates)).total <= of(here, slower).total * (1 + 1e-12)


@given(runs)
def test_the_parts_are_the_whole_and_none_is_negative(what: RooflineStep) -> None:
    found = of(what)
    assert min(getattr(found, f.name) for f in fields(found)) >= 0
    messages = found.within + found.between
    parts = sum(getattr(found, f.name) for f in fields(found)) - messages
    assert found.total == pytest.approx(parts)
    assert found.exposed <= messages + 1e-12


@given(runs)
def test_checkpointing_costs_time_and_stopping_early_saves_some_of_it(what: RooflineStep) -> None:
    kinds: tuple[Literal["none", "early", "whole"], ...] = ("none", "early", "whole")
    none, early, whole = (of(replace(what, recompute=r)).total for r in kinds)
    assert none <= early * (1 + 1e-12)
    assert early <= whole * (1 + 1e-12)


def test_arithmetic_is_six_flop_a_weight_and_token() -> None:
    """All weights in matrix products count, forward and backward; the embedding table does not."""
    in_products = LLAMA_3_8B.parameters - LLAMA_3_8B.vocabulary * LLAMA_3_8B.hidden
    assert ideal(run(), A100).matmul * A100.matmul_flops == pytest.approx(6 * in_products * 8192, rel=1e-3)


def test_a_gpu_of_the_fit_has_its_own_shares() -> None:
    assert FITTED.shares("h100-sxm") != FITTED.shares("a100-80gb-sxm")
    assert FITTED.shares("rtx4090") == (FITTED.matmul_else, FITTED.attention_else)


def test_fsdp_sends_less_for_four_bits_and_more_between_machines() -> None:
    eight = run(devices=8, sharding="fsdp", trained=10**7)
    assert of(replace(eight, numerics=lora(bits=4))).within < of(replace(eight, numerics=lora())).within
    assert of(replace(eight, nodes=2)).between > 0 == of(eight).between
    slow = replace(eight, nodes=2, network=1e9)
    assert of(slow).exposed > of(replace(eight, nodes=2)).exposed


def test_machines_that_share_unevenly_take_the_time_of_the_fullest() -> None:
    three = run(devices=3, nodes=2, sharding="fsdp")
    assert of(three).within == of(replace(three, devices=4)).within > 0


def test_a_sharded_step_updates_its_own_part() -> None:
    eight = run(devices=8, sharding="fsdp")
    assert of(eight).optimizer == pytest.approx(of(run(devices=8, sharding="ddp")).optimizer / 8)


@pytest.mark.parametrize("family", [*FAMILIES, "unheard-of"])
def test_fused_kernels_move_less(family: str) -> None:
    shape: ModelShape = replace(LLAMA_3_8B, family=family, gated_mlp=family != "gpt2")
    assert layer_bytes(shape, FULL, 2048, fused=True) <= layer_bytes(shape, FULL, 2048, fused=False)


def test_scores_that_are_written_out_grow_with_the_row() -> None:
    assert "eager" in ATTENTIONS
    short, long = (layer_bytes(LLAMA_3_8B, lora(attention="eager"), n, fused=False) for n in (512, 4096))
    assert long > short
    assert layer_bytes(LLAMA_3_8B, lora(), 512, fused=False) == layer_bytes(LLAMA_3_8B, lora(), 4096, fused=False)


def test_weights_are_unpacked_for_every_use_and_cast_once() -> None:
    assert weight_bytes(lora(bits=4), 3) == 3 * (0.5 + 4)
    assert weight_bytes(replace(FULL, weight=4), 3) == 3 * 2 + 6 + 8


def test_every_optimizer_has_its_traffic() -> None:
    assert {name: optimizer_bytes(name, 4) > 0 for name in STATES} == dict.fromkeys(STATES, True)
    assert optimizer_bytes("adamw_8bit", 2) < optimizer_bytes("adamw_fused", 2) < optimizer_bytes("adamw_foreach", 2)

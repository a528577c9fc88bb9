"""Properties of every estimate: more work never takes less memory, and all memory is freed again."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import FAMILIES, family_spec
from broker.estimator.memory.estimate import (
    ATTENTIONS,
    METHODS,
    OPTIMIZERS,
    PRECISIONS,
    Attention,
    EstimateOptions,
    estimate,
    numerics,
)
from broker.estimator.memory.simulator import simulate
from broker.estimator.memory.simulator.library_versions import is_version_4, loss_of, release_of
from broker.estimator.memory.simulator.types import Step
from tests.unit.broker.estimator.memory.test_estimate import of

FAMILIES = [
    *(of(name) for name in FAMILIES),
    of("falcon", kv_heads=1, parallel=True, activation="gelu"),
    of("falcon", parallel=True, parallel_norms=2, activation="gelu"),
    of("gpt2", kv_heads=8, activation="gelu_new", dropout=True, gated_mlp=False),
    of("gpt_neox", kv_heads=8, parallel=True, parallel_norms=2, activation="gelu"),
    of("llama", tied_embeddings=True),
    of("llama", layers=1),
    of("mamba"),
    of("gemma2", window=128, windowed=(True, False, True, False, True)),
    of("qwen3", window=128, windowed=(False, False, False, True, True)),
    of("llama", layers=9, window=64, windowed=(False, True, True, True, False, True, True, True, False)),
    replace(of("mixtral", experts=4, active_experts=2), parameters=14_000_000),
]


@pytest.mark.parametrize("shape", FAMILIES, ids=lambda s: f"{s.family}-{s.layers}-{s.kv_heads}-{s.parallel_norms}")
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_checkpointing_trades_activations_of_deep_models(shape: ModelShape, attention: Attention) -> None:
    deep = replace(shape, layers=40, parameters=shape.parameters + 35 * (3_000_000 if shape.experts else 800_000))
    deep = replace(deep, windowed=(8 * shape.windowed)[:40])
    for method, precision in product(("full", "lora", "qlora"), ("bf16", "bf16-autocast", "fp32")):
        if method == "qlora" and (precision == "fp32" or shape.experts):
            continue
        for rows in (1, 4):
            ask = EstimateOptions(method=method, precision=precision, rows=rows, length=512, attention=attention)
            kept = estimate(deep, ask).peak_allocated
            assert estimate(deep, replace(ask, checkpointing=True)).peak_allocated < kept
            assert estimate(deep, replace(ask, dropout=0.0)).peak_allocated <= kept


asks = st.builds(
    EstimateOptions,
    method=st.sampled_from([m for m in METHODS if m != "adapter"]),
    optimizer=st.sampled_from(OPTIMIZERS),
    precision=st.sampled_from(PRECISIONS),
    length=st.integers(1, 4096),
    rows=st.integers(1, 16),
    accumulated=st.booleans(),
    checkpointing=st.booleans(),
    rank=st.integers(1, 64),
    dropout=st.sampled_from([0.0, 0.1]),
    attention=st.sampled_from(ATTENTIONS),
    transformers=st.sampled_from([None, "4.45.2", "4.48.1", "5.17.0"]),
)


def answerable(ask: EstimateOptions) -> EstimateOptions:
    return replace(ask, precision="bf16") if ask.precision == "fp32" and ask.method in ("qlora", "lora8") else ask


@settings(max_examples=25)
@given(shape=st.sampled_from(FAMILIES), ask=asks.map(answerable), gpus=st.integers(1, 16))
def test_more_work_never_takes_less_and_more_shards_never_more(
    shape: ModelShape, ask: EstimateOptions, gpus: int
) -> None:
    if shape.experts and ask.method in ("qlora", "lora8"):  # refused for transformers 5
        ask = replace(ask, transformers="4.48.1")
    base = estimate(shape, ask)
    assert base.peak_allocated > 0
    assert min(base.by_category.values()) >= 0
    for more in (replace(ask, rows=ask.rows + 1), replace(ask, length=ask.length + 1), replace(ask, rank=ask.rank + 1)):
        assert estimate(shape, more).peak_allocated >= base.peak_allocated
    windowed = shape.windowed and (*shape.windowed, True)
    deeper = replace(shape, layers=shape.layers + 1, parameters=shape.parameters + 3_000_000, windowed=windowed)
    assert estimate(deeper, ask).peak_allocated >= base.peak_allocated
    fewer = estimate(shape, replace(ask, gpus=gpus + 1, sharding="fsdp"))
    more = estimate(shape, replace(ask, gpus=gpus + 2, sharding="fsdp"))
    assert more.peak_allocated <= fewer.peak_allocated
    offloaded = estimate(shape, replace(ask, gpus=gpus + 2, sharding="fsdp", offload=True))
    assert offloaded.peak_allocated <= more.peak_allocated
    two, three = (
        estimate(shape, replace(ask, gpus=2 * (gpus + n), nodes=2, sharding="hybrid")).peak_allocated for n in (1, 2)
    )
    assert three <= two
    if "q" in family_spec(shape).names and not shape.kv_heads % 2 and ask.method not in ("qlora", "lora8"):
        divided = estimate(shape, replace(ask, gpus=2, sharding="tensor")).peak_allocated
        assert divided <= 1.01 * base.peak_allocated, "the sum of both parts may exist next to one of them"


@given(shape=st.sampled_from(FAMILIES), ask=asks.map(answerable))
def test_everything_that_a_step_allocates_is_freed_again(shape: ModelShape, ask: EstimateOptions) -> None:
    """The optimizer's step holds weights, gradients, states and the memory of the update alone. With checkpointed
    adapters the embeddings, which are made to require a gradient, and their gradient are left too.
    """
    how, _ = numerics(shape, ask)
    step = Step(
        numerics=how,
        rows=ask.rows,
        length=ask.length,
        checkpointing=ask.checkpointing,
        reentrant=is_version_4(release_of(ask.transformers)),
        loss=loss_of("x", release_of(ask.transformers)),
    )
    last = simulate(shape, step).segments["optimizer"]
    left = 8 * ask.rows * ask.length * shape.hidden + 1024 if ask.checkpointing and not how.full else 0
    assert last["activations"] + last["logits"] <= left
    assert last["temporary"] <= left

"""Memory estimates of encoder-decoders. tests/trainer/memtrace compares the same estimates with the tracer."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.estimator.memory.estimate import EstimateOptions
from broker.estimator.speed.calibration import SPREAD_OTHER_CODE_FAR
from broker.sizing.estimate import EstimateError, estimate
from broker.sizing.what_if import what_if

T5, FLAN, BART = "google-t5/t5-small", "google/flan-t5-base", "facebook/bart-base"
PARAMETERS = {T5: 60_506_624, FLAN: 247_577_856, BART: 139_420_416}
MODELS = sorted(PARAMETERS)


def peak(model: str, **asked: Any) -> int:
    found: int = estimate(model, **{"seq": 128, **asked})["peak_allocated_bytes"]
    return found


@pytest.mark.parametrize("model", MODELS)
def test_a_published_model_is_estimated_with_its_parameters(model: str) -> None:
    found = estimate(model, method="full", seq=256, target_seq=64, micro_batch=8)
    assert found["parameters"] == found["trainable_parameters"] == PARAMETERS[model]
    bias = 50265 * 4 if model == BART else 0
    assert found["by_category"]["weights"] == 4 * PARAMETERS[model] + bias
    assert found["by_category"]["optimizer"] == 8 * PARAMETERS[model]
    assert found["evidence"] == "traced"
    assert found["tokens_per_s_basis"] == "no --gpu was given"


def test_a_former_hub_name_gives_the_same_estimate() -> None:
    assert estimate("t5-small", seq=64)["peak_allocated_bytes"] == peak(T5, seq=64)


@pytest.mark.parametrize("model", MODELS)
def test_a_lora_adapts_both_kinds_of_attention(model: str) -> None:
    names = "q_proj,v_proj" if model == BART else "q,v"
    layers, wide = {T5: (6, 512 + 512), FLAN: (12, 768 + 768), BART: (6, 768 + 768)}[model]
    found = estimate(model, seq=64, lora_r=4, lora_targets=names)
    assert found["trainable_parameters"] == 4 * layers * 3 * 2 * wide


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-autocast"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_lora_with_checkpointing_needs_least(model: str, precision: str, attention: str) -> None:
    asked: dict[str, Any] = {"seq": 256, "target_seq": 100, "precision": precision, "attention": attention}
    asked |= {"micro_batch": 4, "accumulate": True}
    full, lora = peak(model, method="full", **asked), peak(model, method="lora", **asked)
    assert peak(model, method="lora", gradient_checkpointing=True, **asked) < lora < full


@given(st.sampled_from(MODELS), st.booleans(), st.integers(1, 500), st.integers(1, 500), st.integers(1, 16))
def test_more_rows_or_tokens_never_need_less(model: str, least: bool, seq: int, target: int, rows: int) -> None:
    asked: dict[str, Any] = {"gradient_checkpointing": least, "seq": seq, "target_seq": target, "micro_batch": rows}
    here = peak(model, **asked)
    for name, more in (("seq", seq + 8), ("target_seq", target + 8), ("micro_batch", rows + 1)):
        assert peak(model, **{**asked, name: more}) >= here


def test_the_output_is_as_long_as_the_input_by_default() -> None:
    assert peak(T5, seq=300) == peak(T5, seq=300, target_seq=300) > peak(T5, seq=300, target_seq=30)


def test_t5s_output_matrices_are_not_quantised() -> None:
    config = {"model_type": "t5", "d_model": 512, "d_ff": 2048, "d_kv": 64, "num_heads": 8, "num_layers": 6}
    lora, qlora = (estimate(config=config, seq=16, method=m, lora_targets="q") for m in ("lora", "qlora"))
    quantised = 12 * 512 * 2048 + 18 * 4 * 512 * 512
    saved = lora["by_category"]["weights"] - qlora["by_category"]["weights"]
    norms = 2 * (12 + 1 + 18 + 1) * 512
    tables = 2048 * (12 + 18 * 4)  # one table for each 4-bit matrix
    assert saved + norms + tables == pytest.approx(quantised * (2 - 0.5 - 1 / 64), rel=1e-3)
    assert (lora["margin_pct"], qlora["margin_pct"]) == (5, 10)


def test_gated_t5_has_one_more_matrix_per_mlp() -> None:
    base = {"model_type": "t5", "num_layers": 2, "num_decoder_layers": 3}
    plain, gated = (estimate(config=base | {"feed_forward_proj": kind}, seq=64) for kind in ("relu", "gated-silu"))
    assert gated["parameters"] - plain["parameters"] == 5 * 512 * 2048
    still = estimate(config=base | {"dropout_rate": 0.0}, seq=64, lora_dropout=0.0)
    assert still["peak_allocated_bytes"] < plain["peak_allocated_bytes"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"model": T5, "attention": "flash"}, "--attention flash: t5 adds positions to its scores; use sdpa or eager"),
        ({"model": T5, "gpus": 2, "sharding": "fsdp"}, "--sharding fsdp: not known for t5; use none or ddp"),
        ({"model": T5, "stack": "transformers=4.48.1"}, "--stack transformers=4.48.1: not known for t5; leave it out"),
        ({"model": T5, "target_seq": 0}, "--target-seq 0: must be at least 1"),
        ({"model": T5, "resolution": 512}, "--resolution 512: t5 is not a UNet; leave it out"),
        ({"model": T5, "lora_targets": "q_proj"}, "--lora-targets q_proj matches no module of t5"),
        ({"model": BART, "target_seq": 2000}, "--target-seq 2000: the model has 1024 positions"),
        (
            {"model": "openai-community/gpt2", "target_seq": 8},
            "--target-seq 8: gpt2 is not an encoder-decoder; give --seq",
        ),
        ({"config": {"model_type": "bart", "d_model": 100}}, "a d_model of 100, which 16 heads do not divide"),
        ({"config": {"model_type": "bart", "decoder_attention_heads": 4}}, "other heads in its decoder"),
    ],
)
def test_an_invalid_option_is_one_line(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(EstimateError, match=words) as raised:
        estimate(**{"seq": 64, **asked})
    assert "\n" not in str(raised.value)


def test_scaling_table_counts_reads_and_writes_and_states_its_evidence() -> None:
    """A row counts input and output tokens, and the interval shows that nothing was measured."""
    ask = EstimateOptions(length=512, target=128)
    found = what_if("gpus=1,2,16", model=T5, gpu="L40S", ask=ask, global_batch=1024, rows=6400 * 16)
    assert found["tokens_per_row"] == 640
    for row in found["points"]:
        low, high = row["tokens_per_s_interval"]
        assert (row["tokens_per_s"] / low, high / row["tokens_per_s"]) == pytest.approx(
            (SPREAD_OTHER_CODE_FAR,) * 2, rel=1e-3
        )
        assert row["plan"]["parallelism"] in ("single", "ddp"), "sharding of encoder-decoders is not known"
        assert 0 < row["mfu"] < 1
        assert row["hours"] * 3600 * row["tokens_per_s"] == pytest.approx(6400 * 16 * 640, rel=1e-3)
    more = what_if("gpus=1", model=T5, gpu="L40S", ask=replace(ask, target=512), global_batch=1024, rows=6400 * 16)
    assert more["points"][0]["hours"] > found["points"][0]["hours"]

"""Whisper and Stable Diffusion's UNets, estimated from the committed tables of traces."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.model_catalog import catalog as catalogue
from broker.model_catalog import trace_tables as traced
from broker.sizing.estimate import EstimateError, estimate

UNET = "stable-diffusion-v1-5/stable-diffusion-v1-5"
WHISPER = "openai/whisper-base"


def test_the_tables_are_small_and_say_their_versions() -> None:
    assert len(json.dumps(traced.document())) < 60_000
    assert set(traced.document()["versions"]) == {"torch", "transformers"}


@pytest.mark.parametrize("name", [*traced.names("whisper"), *traced.names("unet")])
def test_a_model_with_tables_is_estimated_by_them(name: str) -> None:
    known = catalogue.find(name)
    assert known is not None
    full, lora = (estimate(name, method=method) for method in ("full", "lora"))
    assert full["evidence"] == lora["evidence"] == "table"
    assert name in full["evidence_detail"]
    assert full["margin_pct"] == (25 if name in traced.names("unet") else 10)
    frozen = known.config.get("max_source_positions", 0) * known.config.get("d_model", 0)  # sines and cosines
    assert full["parameters"] == full["trainable_parameters"] + frozen == known.parameters
    assert full["by_category"]["optimizer"] == pytest.approx(8 * full["trainable_parameters"], rel=0.001)
    assert lora["by_category"]["optimizer"] == pytest.approx(8 * lora["trainable_parameters"], rel=0.1, abs=1 << 20)
    assert sum(lora["by_category"].values()) == lora["device_used_bytes"] < full["device_used_bytes"]


def test_a_lora_of_stable_diffusion_trains_as_much_as_diffusers_does() -> None:
    assert estimate(UNET, lora_r=4)["trainable_parameters"] == 797_184


@given(st.sampled_from([UNET, WHISPER]), st.sampled_from(["full", "lora"]), st.booleans(), st.integers(1, 40))
def test_more_rows_never_need_less(name: str, method: str, least: bool, rows: int) -> None:
    asked: dict[str, Any] = {"method": method, "gradient_checkpointing": least}
    here, more = (estimate(name, micro_batch=n, **asked)["peak_allocated_bytes"] for n in (rows, rows + 1))
    assert more >= here


@given(st.sampled_from(["full", "lora"]), st.integers(8, 200), st.integers(1, 60), st.integers(1, 128))
def test_more_of_a_row_or_of_a_rank_never_needs_less(method: str, side: int, tokens: int, rank: int) -> None:
    def needed(name: str, **asked: Any) -> int:
        found: int = estimate(name, method=method, **asked)["peak_allocated_bytes"]
        return found

    assert needed(UNET, resolution=8 * side + 8, lora_r=rank) >= needed(UNET, resolution=8 * side, lora_r=rank)
    assert needed(UNET, lora_r=rank + 1) >= needed(UNET, lora_r=rank)
    assert needed(WHISPER, target_seq=tokens + 8) >= needed(WHISPER, target_seq=tokens)


def test_earlier_gradients_and_foreach_kernels_take_more() -> None:
    base = estimate(UNET, method="full")["peak_allocated_bytes"]
    assert estimate(UNET, method="full", accumulate=True)["peak_allocated_bytes"] > base
    many = estimate(UNET, method="full", optimizer="adamw_foreach")
    assert many["segment"] == "optimizer"
    assert many["peak_allocated_bytes"] > base


@pytest.mark.parametrize(
    ("model", "asked", "words"),
    [
        (UNET, {"resolution": 500}, "--resolution 500: must be from 64 to 4096 and divisible by 8"),
        (UNET, {"target_seq": 5}, "--target-seq 5: a UNet writes no tokens; give --resolution"),
        (UNET, {"precision": "fp32"}, "--precision fp32: the tables of unet have only bf16-autocast or fp16-autocast"),
        (UNET, {"method": "qlora"}, "--method qlora: the tables of unet have only full or lora"),
        (UNET, {"lora_targets": "to_q"}, "--lora-targets to_q: the tables of unet have only all-linear or to_q,to_k"),
        (UNET, {"micro_batch": 0}, "--micro-batch 0: must be at least 1"),
        (UNET, {"gpus": 2}, "--sharding ddp: the tables of unet have only none"),
        (WHISPER, {"target_seq": 500}, "--target-seq 500: must be from 1 to the model's 448 positions"),
        (WHISPER, {"resolution": 512}, "--resolution 512: whisper is not a UNet; leave it out"),
        (WHISPER, {"stack": "transformers=4.48.1"}, "--stack 4.48.1: the tables of whisper have only none"),
    ],
)
def test_a_model_without_a_table_is_refused_in_one_line(model: str, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(EstimateError) as raised:
        estimate(model, **asked)
    assert str(raised.value).startswith(words)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "config", [{"model_type": "whisper", "d_model": 100}, {"_class_name": "UNet2DConditionModel", "in_channels": 9}]
)
def test_another_model_of_that_kind_is_not_guessed(config: dict[str, Any]) -> None:
    with pytest.raises(EstimateError, match=r"no trace table matches this (whisper|unet); known are"):
        estimate(config=config)

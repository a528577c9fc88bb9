"""Memory of encoders with a head, by the tape alone; tests/trainer/memtrace compares with the tracer."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.estimator.memory.job_memory import memory
from broker.estimator.speed.calibration import SPREAD_OTHER_CODE_FAR
from broker.model_catalog import catalog as catalogue
from broker.model_catalog.encoder_shape import ENCODERS, encoder_shape
from broker.sizing.estimate import EstimateError, estimate
from tests.support.machines import WORK

PUBLISHED = {
    "bert": "google-bert/bert-base-uncased",
    "roberta": "FacebookAI/roberta-base",
    "distilbert": "distilbert/distilbert-base-uncased",
    "vit": "google/vit-base-patch16-224",
}
HEADLESS = {"bert": 109_483_778, "roberta": 124_647_170, "distilbert": 66_955_010, "vit": 86_567_656}
"""Parameters with a head for two classes (ViT: its thousand), as transformers' own classes have."""


@pytest.mark.parametrize("family", sorted(ENCODERS))
def test_a_published_encoder_is_estimated_with_its_head(family: str) -> None:
    found = estimate(PUBLISHED[family], method="full", seq=256, micro_batch=8)
    assert found["parameters"] == found["trainable_parameters"] == HEADLESS[family]
    assert found["by_category"]["weights"] == 4 * HEADLESS[family]
    assert found["by_category"]["optimizer"] == 8 * HEADLESS[family]
    assert found["evidence"] == "traced"


@pytest.mark.parametrize("family", sorted(ENCODERS))
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-autocast"])
def test_a_lora_with_checkpointing_needs_less_than_all_weights(family: str, accumulate: bool, precision: str) -> None:
    asked: dict[str, Any] = {"seq": 256, "micro_batch": 4, "precision": precision, "accumulate": accumulate}
    full = estimate(PUBLISHED[family], method="full", **asked)
    lora = estimate(PUBLISHED[family], method="lora", **asked)
    least = estimate(PUBLISHED[family], method="lora", gradient_checkpointing=True, **asked)
    assert least["peak_allocated_bytes"] < lora["peak_allocated_bytes"] < full["peak_allocated_bytes"]


def test_a_lora_trains_the_head_whole_and_berts_pooler_with_an_adapter() -> None:
    every = estimate(PUBLISHED["bert"], seq=256, lora_r=8)["trainable_parameters"]
    attention = estimate(PUBLISHED["bert"], seq=256, lora_r=8, lora_targets="query,value")["trainable_parameters"]
    head = 768 * 2 + 2
    assert attention == 12 * 2 * 8 * 2 * 768 + head
    assert every == 12 * 8 * (4 * 2 * 768 + 2 * (768 + 3072)) + 8 * 2 * 768 + head


def test_an_images_tokens_are_its_patches_at_any_length_option() -> None:
    short, long = (estimate(PUBLISHED["vit"], seq=seq) for seq in (16, 4096))
    assert short["peak_allocated_bytes"] == long["peak_allocated_bytes"]


def test_tags_of_words_have_no_pooler() -> None:
    found = catalogue.find(PUBLISHED["bert"])
    assert found is not None
    text, words = (encoder_shape("m", found.config, f"{kind}_classification") for kind in ("text", "token"))
    assert text.parameters - words.parameters == 768 * 768 + 768
    needs = [memory(replace(WORK, method="full", shape=shape), bf16=True, gpu=True) for shape in (text, words)]
    assert needs[0] is not None
    assert needs[1] is not None
    assert needs[0].weights - needs[1].weights == 4 * (768 * 768 + 768)


def test_an_image_models_dropout_keeps_a_mask_for_every_patch() -> None:
    found = catalogue.find(PUBLISHED["vit"])
    assert found is not None
    without, with_it = (
        estimate(config=dict(found.config) | {"hidden_dropout_prob": share}, method="full", seq=16, micro_batch=8)
        for share in (0.0, 0.1)
    )
    assert with_it["peak_allocated_bytes"] > without["peak_allocated_bytes"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"num_attention_heads": 7}, "7 heads do not divide"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"type_vocab_size": -1}, "type_vocab_size"),
    ],
)
def test_a_config_that_no_encoder_can_have_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(EstimateError, match=told):
        estimate(config={"model_type": "bert", **fields})


def test_a_row_longer_than_the_positions_is_refused() -> None:
    with pytest.raises(EstimateError, match="512 positions"):
        estimate(PUBLISHED["roberta"], seq=513)


@given(
    family=st.sampled_from(["bert", "roberta", "distilbert"]),
    method=st.sampled_from(["full", "lora"]),
    rows=st.integers(1, 16),
    length=st.integers(1, 500),
    checkpointing=st.booleans(),
)
def test_more_rows_or_longer_ones_never_need_less(
    family: str, method: str, rows: int, length: int, checkpointing: bool
) -> None:
    def peak(rows: int, length: int) -> int:
        found: int = estimate(
            PUBLISHED[family], method=method, micro_batch=rows, seq=length, gradient_checkpointing=checkpointing
        )["peak_allocated_bytes"]
        return found

    assert peak(rows, length) <= peak(rows + 1, length)
    assert peak(rows, length) <= peak(rows, length + 12)


def test_the_speed_of_an_encoder_is_a_count_with_the_wide_interval() -> None:
    found = estimate(PUBLISHED["bert"], seq=256, micro_batch=256, gpu="L40S")
    low, high = found["tokens_per_s_interval"]
    assert high / low == pytest.approx(SPREAD_OTHER_CODE_FAR**2, rel=1e-3)
    assert "none was measured" in found["tokens_per_s_basis"]

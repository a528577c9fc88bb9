"""Recipes: the bytes that follow from each fact of a library's code."""

from dataclasses import replace
from typing import Any

import pytest

from broker.domain.workload import ModelShape
from broker.estimator.memory.estimate import EstimateOptions, InvalidEstimate, estimate
from broker.estimator.memory.recipes import KNOWN, RECIPES
from tests.support.machines import LLAMA_3_8B

V, H, L, P = LLAMA_3_8B.vocabulary, LLAMA_3_8B.hidden, LLAMA_3_8B.layers, LLAMA_3_8B.parameters


def bytes_of(recipe: str, category: str, shape: ModelShape = LLAMA_3_8B, **ask: Any) -> int:
    options = EstimateOptions(recipe=recipe, length=512, checkpointing=True, **ask)  # type: ignore[arg-type]
    return estimate(shape, options).by_category[category]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_each_recipe_answers_with_its_own_margin_and_source(recipe: Any, method: Any) -> None:
    found = estimate(LLAMA_3_8B, EstimateOptions(recipe=recipe, method=method))
    assert found.peak_allocated > 0
    assert found.margin >= KNOWN[recipe].margin
    assert (recipe == "gpubroker") != (found.tier == "formula" and f"recipe {recipe} by formula" in found.evidence)


def test_what_a_library_does_not_do_with_memory_is_named() -> None:
    words = estimate(LLAMA_3_8B, EstimateOptions(recipe="unsloth")).evidence
    assert "not counted: fused LoRA, and checkpoints in host memory" in words


def test_autocast_over_weights_as_loaded_halves_weights_and_states() -> None:
    """Each trained weight has 2 bytes, and 4 of moments, in place of 4 and 8."""
    for recipe in ("hf-trainer", "fms-foak", "axolotl"):
        ask: dict[str, Any] = {"method": "full", "optimizer": "adamw_fused"}
        assert bytes_of(recipe, "weights", **ask) == 2 * P
        assert bytes_of(recipe, "optimizer", **ask) == 4 * P
        assert bytes_of("gpubroker", "weights", **ask) == 4 * P


def test_sharded_masters_stay_float32() -> None:
    """accelerate raises trained weights to float32 under FSDP."""
    ask: dict[str, Any] = {"method": "full", "gpus": 2, "sharding": "fsdp"}
    assert bytes_of("hf-trainer", "weights", **ask) == 4 * P // 2


def test_peft_raises_embeddings_head_and_norms() -> None:
    raised = bytes_of("peft-kbit", "weights", method="qlora") - bytes_of("axolotl", "weights", method="qlora")
    assert raised == 2 * (2 * V * H + (2 * L + 1) * H)
    assert bytes_of("peft-kbit", "weights", method="lora") == bytes_of("axolotl", "weights", method="lora")


def test_a_plain_loop_holds_the_logits_through_the_step() -> None:
    """The model of 128,256 words has 4 bytes for each of 512 x 128,256 logits, which the head computes in float32."""
    ask: dict[str, Any] = {"method": "qlora", "precision": "bf16"}
    held = bytes_of("peft-kbit", "logits", **ask)
    assert held >= 3 * 4 * 512 * V
    assert bytes_of("axolotl", "logits", **ask) < held


def test_trl_loads_a_float32_base_and_halves_quantised_adapters() -> None:
    assert bytes_of("trl", "weights", method="lora") - bytes_of("hf-trainer", "weights", method="lora") == 2 * P
    adapters = estimate(LLAMA_3_8B, EstimateOptions(method="qlora")).trainable
    more = bytes_of("axolotl", "optimizer", method="qlora") - bytes_of("trl", "optimizer", method="qlora")
    assert more == 4 * adapters


def test_litgpt_has_single_scales_and_a_quantised_head_of_its_own() -> None:
    tied = replace(LLAMA_3_8B, tied_embeddings=True, parameters=P - V * H)
    alone = bytes_of("litgpt", "weights", tied, method="qlora", precision="bf16")
    assert alone == bytes_of("litgpt", "weights", method="qlora", precision="bf16")
    matrices = P - V * H - (2 * L + 1) * H
    adapters = estimate(LLAMA_3_8B, EstimateOptions(method="qlora")).trainable
    rest = 2 * (P - matrices) + 2 * adapters
    assert alone == matrices // 2 + matrices // 64 * 4 + rest


def test_autocast_keeps_no_copy_of_a_frozen_float32_weight() -> None:
    """torch caches the half-precision copy of a weight only if the weight requires a gradient."""
    frozen = EstimateOptions(recipe="trl", length=8, checkpointing=True)
    assert estimate(LLAMA_3_8B, frozen).by_category["activations"] < 2 * P // L


def test_loss_in_chunks_and_in_place_need_fewer_logits() -> None:
    sizes = {name: bytes_of(name, "logits", method="lora") for name in ("hf-trainer", "fms-foak", "unsloth")}
    assert sizes["hf-trainer"] == pytest.approx(2 * sizes["fms-foak"], rel=0.01)
    assert sizes["fms-foak"] > sizes["unsloth"]


def test_kept_chunks_count_until_the_backward_pass() -> None:
    """Torchtune keeps seven of eight chunks of bf16 logits while it computes the loss of the eighth."""
    assert bytes_of("torchtune", "logits", method="lora", precision="bf16") >= 2 * 512 * V * 7 // 8


def test_fused_norms_and_rotary_positions_need_less_without_checkpointing() -> None:
    """A fused norm holds its bf16 input; a norm in PyTorch's operations holds a float32 copy of it."""
    estimate_options = EstimateOptions(method="lora", length=1024, rows=8)
    plain, fused = (
        estimate(LLAMA_3_8B, replace(estimate_options, recipe=r)).by_category["activations"]
        for r in ("hf-trainer", "fms-foak")
    )
    assert plain - fused == pytest.approx((2 * L + 1) * 8 * 1024 * H * 2, rel=0.1)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ({"recipe": "nanotron"}, "--recipe nanotron: not one of gpubroker, hf-trainer"),
        ({"recipe": "litgpt", "transformers": "4.48.1"}, "litgpt has its own models; leave it out"),
    ],
)
def test_a_recipe_that_is_not_known_is_refused(ask: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidEstimate, match=message):
        estimate(LLAMA_3_8B, EstimateOptions(**ask))


def test_recipes_are_known_for_decoders_alone() -> None:
    classifier = replace(LLAMA_3_8B, head="text", labels=2)
    with pytest.raises(InvalidEstimate, match="--recipe trl: known for decoder language models only; leave it out"):
        estimate(classifier, EstimateOptions(recipe="trl"))

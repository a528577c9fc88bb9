"""Parameter counts of configs that are not in the catalogue, compared with transformers' classes on the meta device.

The cases vary biases, norms, and fields that a class ignores."""

from typing import Any

import pytest

from broker.model_catalog.config_defaults import filled
from broker.model_catalog.parameter_count import BIASED_ATTENTION, PLAIN_HEADS, parameters
from broker.sizing.estimate import EstimateError, estimate

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
BIASES = {"attention_bias": True, "mlp_bias": True}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((family, BIASES | (EXPERTS if family == "qwen3_moe" else {})) for family in sorted(BIASED_ATTENTION)),
    *((family, BIASES) for family in ("mistral", "phi3", "qwen2")),
    *((family, {}) for family in sorted(PLAIN_HEADS & {"falcon", "gpt_neox"})),
    ("gpt_neox", {"attention_bias": False}), ("gpt_neox", {"head_dim": 64}), ("phi", {"qk_layernorm": True}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}), ("falcon", {"ffn_hidden_size": 700}),
    ("falcon", {"parallel_attn": False, "multi_query": False, "bias": True}), ("starcoder2", {"use_bias": False}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "more"), CASES)
def test_every_parameter_of_the_class_is_counted(family: str, more: dict[str, Any]) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = {"model_type": family, **SIZES, **more}
    if family in PLAIN_HEADS or family == "starcoder2":
        config["hidden_act"] = "gelu"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    assert parameters(filled(config)[0]) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("field", ["attention_bias", "mlp_bias", "qk_layernorm"])
def test_a_switch_is_true_or_false(field: str) -> None:
    with pytest.raises(EstimateError, match=f"{field} 'yes', which is neither true nor false"):
        estimate(config={"model_type": "llama", **SIZES, field: "yes"}, seq=64)

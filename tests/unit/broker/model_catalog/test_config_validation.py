"""Configs that describe no model are refused in one line that names the field."""

import json
from typing import Any

import pytest

from broker.sizing.estimate import EstimateError, estimate

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 1000, "num_hidden_layers": 5, "max_position_embeddings": 512,
}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
T5 = {"model_type": "t5", "is_encoder_decoder": True}
VIT = {"model_type": "vit", "image_size": 32, "patch_size": 16}


@pytest.mark.parametrize(
    ("config", "change", "told"),
    [
        (LLAMA, {"hidden_act": "silly"}, "hidden_act 'silly', which is not an activation"),
        (LLAMA, {"hidden_act": 3}, "hidden_act 3, which"),
        (LLAMA, {"model_type": "mistral", "sliding_window": -1}, "sliding_window -1"),
        (LLAMA, {"model_type": "mistral", "sliding_window": "4096"}, "sliding_window '4096'"),
        (LLAMA, {"model_type": "gemma2", "layer_types": "full_attention"}, "layer_types 'full_attention'"),
        (LLAMA, {"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern 0"),
        (MIXTRAL, {"num_local_experts": 0}, "num_local_experts 0"),
        (MIXTRAL, {"num_local_experts": "8"}, "num_local_experts '8'"),
        (MIXTRAL, {"num_experts_per_tok": 5}, "num_experts_per_tok 5, which is not a number from 1 to its 4 experts"),
        (MIXTRAL, {"num_experts_per_tok": 0}, "num_experts_per_tok 0"),
        (LLAMA, {"hidden_size": 10**12}, "hidden_size 1000000000000, and no model has more than 1000000"),
        (LLAMA, {"num_hidden_layers": 10**12}, "num_hidden_layers 1000000000000"),
        (LLAMA, {"max_position_embeddings": 10**12}, "max_position_embeddings 1000000000000"),
        (LLAMA, {"head_dim": 0}, "no positive head_dim: 0"),
        (LLAMA, {"head_dim": None, "hidden_size": 250}, "hidden_size of 250, which 8 heads do not divide"),
        (LLAMA, {"vocab_size": 0}, "no positive vocab_size: 0"),
        (LLAMA, {"hidden_size": "256"}, "no positive hidden_size: '256'"),
        (LLAMA, {"hidden_size": float("nan")}, "no positive hidden_size: nan"),
        (LLAMA, {"intermediate_size": 704.0}, "no positive intermediate_size: 704.0"),
        (LLAMA, {"attention_dropout": float("nan")}, "attention_dropout nan"),
        (LLAMA, {"model_type": "gpt2", "resid_pdrop": "0.1"}, "resid_pdrop '0.1'"),
        (LLAMA, {"tie_word_embeddings": "false"}, "tie_word_embeddings 'false'"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "is quantised"),
        (T5, {"feed_forward_proj": "gated-silly"}, "feed_forward_proj 'gated-silly', which is not an activation"),
        (T5, {"feed_forward_proj": [[]]}, "feed_forward_proj [[]], which"),
        (VIT, {"patch_size": 64}, "patch_size 64, larger than its image_size 32"),
        (VIT, {"hidden_dropout_prob": 1.5}, "hidden_dropout_prob 1.5"),
    ],
)
def test_impossible_config_values_are_refused_by_name(
    config: dict[str, Any], change: dict[str, Any], told: str
) -> None:
    with pytest.raises(EstimateError) as refused:
        estimate(config=json.dumps(config | change), seq=64)
    assert told in str(refused.value)
    assert "only decoder-only" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_multimodal_config_is_that_of_its_language_model_and_says_so() -> None:
    nested = {
        "model_type": "gemma3",
        "text_config": LLAMA | {"model_type": "gemma3_text"},
    }
    estimated = estimate(config=nested, seq=64)
    assert estimated["family"] == "gemma3_text"
    lacking = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 3}}
    assert "the config lacks hidden_size" in estimate(config=lacking, seq=64)["notes"][0]
    tied = estimate(config={"text_config": LLAMA, "tie_word_embeddings": True}, seq=64)
    assert tied["parameters"] == estimate(config=LLAMA, seq=64)["parameters"] - 256_000
    with pytest.raises(EstimateError, match="is quantised"):
        estimate(config=nested | {"quantization_config": {"load_in_4bit": True}}, seq=64)

"""The tape over a base of 4 bits, and under a window, against figures that the tracer printed on 2026-11-25,
and of Gemma 2 on 2026-11-28."""

from typing import Any

import pytest

from broker.estimator.memory.device_overhead import CUBLAS_WORKSPACE
from broker.sizing.estimate import estimate

LIKE_LLAMA: dict[str, Any] = {"max_position_embeddings": 2048, "vocab_size": 1000, "tie_word_embeddings": False}
GEMMA2 = {
    **LIKE_LLAMA, "model_type": "gemma2", "vocab_size": 4096, "hidden_size": 576, "num_attention_heads": 12,
    "num_hidden_layers": 3, "intermediate_size": 1768, "num_key_value_heads": 6, "head_dim": 48, "sliding_window": 128,
}  # fmt: skip
GEMMA3 = {
    **LIKE_LLAMA, "model_type": "gemma3_text", "hidden_size": 960, "num_attention_heads": 12, "num_hidden_layers": 13,
    "intermediate_size": 1960, "num_key_value_heads": 1, "head_dim": 80, "sliding_window": 128,
    "sliding_window_pattern": 3,
}  # fmt: skip
PHI3 = {
    **LIKE_LLAMA, "model_type": "phi3", "hidden_size": 320, "num_attention_heads": 4, "num_hidden_layers": 8,
    "intermediate_size": 656, "num_key_value_heads": 1, "sliding_window": 128,
}  # fmt: skip
SMOLLM3 = {
    **LIKE_LLAMA, "model_type": "smollm3", "hidden_size": 960, "num_attention_heads": 12, "num_hidden_layers": 13,
    "intermediate_size": 1960, "num_key_value_heads": 12, "tie_word_embeddings": True,
}  # fmt: skip
LAST = {"method": "lora", "micro_batch": 4, "lora_dropout": 0.1, "optimizer": "adamw_foreach"}


@pytest.mark.parametrize(
    ("config", "ask", "traced"),
    [
        (PHI3, {"seq": 250, "lora_targets": "down_proj,o_proj", "lora_dropout": 0.1}, 43_232_256),
        (
            SMOLLM3,
            {"seq": 1024, "micro_batch": 3, "accumulate": True, "gradient_checkpointing": True, "lora_r": 64},
            657_039_360,
        ),
        (GEMMA2, {**LAST, "seq": 512, "lora_targets": "k_proj,o_proj"}, 590_647_296),
        (
            GEMMA3,
            {
                "method": "lora", "precision": "fp32", "seq": 512, "accumulate": True, "gradient_checkpointing": True,
                "lora_r": 8,
            },
            514_774_016,
        ),
    ],
    ids=["a head of keys, cast", "no dropout, checkpointing", "heads of keys", "a head of keys, as it is"],
)  # fmt: skip
def test_a_quantised_base_is_simulated_as_traced(config: dict[str, Any], ask: dict[str, Any], traced: int) -> None:
    plain = {"method": "qlora", "precision": "bf16-autocast", "micro_batch": 1, "lora_r": 16, "lora_dropout": 0.0}
    found = estimate(config=config, **{"lora_targets": "all-linear", "optimizer": "adamw_fused", **plain, **ask})
    assert found["peak_allocated_bytes"] - CUBLAS_WORKSPACE == pytest.approx(traced, rel=0.005)

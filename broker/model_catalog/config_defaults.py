"""Defaults of config.json, which contains only fields that differ from the architecture's defaults.

The values are those of transformers 5.24's config classes. Families with rotary positions have no default number of
positions here, because rotary positions have no limit.
"""

from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, Any]


def _of(layers: int, hidden: int, inner: int, heads: int, vocabulary: int, **more: Any) -> Fields:
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "vocab_size": vocabulary, **more,
    }  # fmt: skip


GPT = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
BERT = _of(12, 768, 3072, 12, 30522, max_position_embeddings=512, type_vocab_size=2)
DEFAULTS: Mapping[str, Fields] = {
    "llama": _of(32, 4096, 11008, 32, 32000),
    "mistral": _of(32, 4096, 14336, 32, 32000, num_key_value_heads=8),
    "qwen2": _of(32, 4096, 22016, 32, 151936, num_key_value_heads=32),
    "qwen3": _of(32, 4096, 22016, 32, 151936, num_key_value_heads=32, head_dim=128),
    "mixtral": _of(
        32, 4096, 14336, 32, 32000, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2
    ),
    "qwen3_moe": _of(
        24, 2048, 6144, 32, 151936, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "smollm3": _of(36, 2048, 11008, 16, 128256, num_key_value_heads=4),
    "granite": _of(32, 4096, 11008, 32, 32000),
    "phi3": _of(32, 3072, 8192, 32, 32064),
    "gemma": _of(
        28, 3072, 24576, 16, 256000, num_key_value_heads=16, head_dim=256, hidden_act="gelu_pytorch_tanh"
    ),
    "gemma2": _of(
        26, 2304, 9216, 8, 256000, num_key_value_heads=4, head_dim=256, hidden_activation="gelu_pytorch_tanh"
    ),
    "gemma3_text": _of(
        26, 2304, 9216, 8, 262208, num_key_value_heads=4, head_dim=256, hidden_activation="gelu_pytorch_tanh"
    ),
    "olmo2": _of(32, 4096, 11008, 32, 50304),
    "cohere2": _of(40, 8192, 22528, 64, 256000),
    "falcon": {
        "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71, "vocab_size": 65024,
        "activation": "gelu",
    },
    "gpt_neox": _of(44, 6144, 24576, 64, 50432, hidden_act="gelu"),
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "phi": _of(24, 2048, 8192, 32, 51200),
    "bert": BERT,
    "roberta": {**BERT, "vocab_size": 50265},
    "xlm-roberta": BERT,
    "camembert": BERT,
    "distilbert": {
        "n_layers": 6, "dim": 768, "hidden_dim": 3072, "n_heads": 12, "vocab_size": 30522,
        "max_position_embeddings": 512,
    },
    "t5": {
        "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "vocab_size": 32128,
    },
    "bart": {
        "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12, "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096, "encoder_attention_heads": 16, "vocab_size": 50265,
        "max_position_embeddings": 1024,
    },
    "vit": {
        "num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
        "image_size": 224, "patch_size": 16,
    },
    "starcoder2": _of(
        30, 3072, 12288, 24, 49152, num_key_value_heads=2, hidden_act="gelu_pytorch_tanh"
    ),
}  # fmt: skip
SAME_CODE = {"xlm-roberta": "roberta", "camembert": "roberta"}
"""Model types whose classes equal another type's except for names and defaults."""
SAME = (
    ("num_hidden_layers", "n_layer"), ("hidden_size", "n_embd"), ("num_attention_heads", "n_head"),
    ("intermediate_size", "n_inner", "ffn_hidden_size"), ("max_position_embeddings", "n_positions"),
    ("hidden_act", "hidden_activation", "activation", "activation_function"),
    ("num_local_experts", "num_experts", "n_routed_experts"), ("num_key_value_heads", "num_kv_heads"),
)  # fmt: skip
"""Alternative names of one field."""


def kind_of(config: Fields) -> str:
    """Return the config's `model_type`, or the type with the same code; empty if it has none."""
    kind = str(config.get("model_type") or "")
    return SAME_CODE.get(kind, kind)


def filled(config: Fields) -> tuple[Fields, tuple[str, ...]]:
    """Return (the config with its architecture's defaults, the fields that the config lacked).

    The model type is replaced by the type with the same code.
    """
    defaults = DEFAULTS.get(str(config.get("model_type", "")), {})
    lacking = []
    for field in defaults:
        names = next((names for names in SAME if field in names), (field,))
        if not any(config.get(name) is not None for name in names):
            lacking.append(field)
    heads = config.get("num_attention_heads", defaults.get("num_attention_heads"))
    if "num_key_value_heads" in lacking and isinstance(heads, int) and heads % defaults["num_key_value_heads"]:
        lacking.remove("num_key_value_heads")  # the default does not divide the heads; use one for each query head
    same = {"model_type": kind_of(config)} if str(config.get("model_type")) in SAME_CODE else {}
    return {**config, **{field: defaults[field] for field in lacking}, **same}, tuple(lacking)

"""Checks of config.json: sizes beyond any model, rates of one or more, unknown activations."""

import math
import re
from collections.abc import Mapping
from reprlib import repr
from typing import Any

ACTIVATIONS = frozenset({
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh",
    "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu", "relu2",
    "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu",
})  # fmt: skip
"""Activations of transformers 5.24 (`ACT2FN`)."""
ACTIVATION_KEYS = "hidden_act", "activation_function", "hidden_activation", "activation"
MAX_VALUES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 10_000),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 10_000),
    **dict.fromkeys(("hidden_size", "n_embd", "dim", "head_dim", "moe_intermediate_size", "d_model", "d_kv"), 10**6),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_hidden_size", "hidden_dim", "num_labels", "d_ff"), 10**7),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 10**7),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "num_kv_heads"), 10**5),
    **dict.fromkeys(("num_heads", "encoder_attention_heads", "decoder_attention_heads"), 10**5),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok"), 10**5),
    **dict.fromkeys(("image_size", "patch_size", "num_channels", "relative_attention_num_buckets"), 10**5),
    "type_vocab_size": 10**5,
    "vocab_size": 10**8, "max_position_embeddings": 10**9, "n_positions": 10**9, "sliding_window": 10**9,
}  # fmt: skip
"""Limits far above any published model. A larger value is a typo, and its sizes would be meaningless."""
RATES = (
    "resid_pdrop", "embd_pdrop", "residual_dropout", "hidden_dropout", "attention_dropout", "dropout",
    "hidden_dropout_prob", "attention_probs_dropout_prob",
)  # fmt: skip
SWITCHES = (
    "tie_word_embeddings", "multi_query", "new_decoder_architecture", "parallel_attn", "use_parallel_residual",
    "use_sliding_window", "bias", "use_bias", "alibi", "attention_bias", "mlp_bias", "qk_layernorm",
)  # fmt: skip
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


WORD = re.compile(r"[\w.+-]{1,100}", re.ASCII)


def check_kind(config: Mapping[str, Any]) -> None:
    """Raise ValueError, worded as in `check`, for a `model_type` that is not a word."""
    kind = config.get("model_type")
    if kind not in (None, "") and not (isinstance(kind, str) and WORD.fullmatch(kind)):
        raise ValueError(f"model_type {repr(kind)}, which is not a word")


def check(config: Mapping[str, Any]) -> None:
    """Raise ValueError for an invalid field. The message names the field, and continues `config.json has`."""
    for key, maximum in MAX_VALUES.items():
        value = config.get(key)
        if isinstance(value, int) and value > maximum:
            raise ValueError(f"{key} {repr(value)}, and no model has more than {maximum}")
    for key in RATES:
        rate = config.get(key)
        if rate is not None and not (_is_number(rate) and 0 <= rate < 1):
            raise ValueError(f"{key} {repr(rate)}, which is not a number from 0 to below 1")
    for key in SWITCHES:
        if not isinstance(config.get(key), bool | None):
            raise ValueError(f"{key} {repr(config[key])}, which is neither true nor false")
    for key in ACTIVATION_KEYS:
        word = config.get(key)
        if word is not None and not (isinstance(word, str) and word in ACTIVATIONS):
            raise ValueError(f"{key} {repr(word)}, which is not an activation of transformers")
    feed = config.get("feed_forward_proj")  # a field of T5
    if feed is not None and not (isinstance(feed, str) and feed.removeprefix("gated-") in ACTIVATIONS):
        raise ValueError(f"feed_forward_proj {repr(feed)}, which is not an activation of transformers, nor a gated one")
    image, patch = config.get("image_size"), config.get("patch_size")
    if isinstance(image, int) and isinstance(patch, int) and patch > image:
        raise ValueError(f"patch_size {patch}, larger than its image_size {image}")
    _check_window(config)
    _check_experts(config)


def _is_number(value: Any) -> bool:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return is_integer or (isinstance(value, float) and math.isfinite(value))


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_window(config: Mapping[str, Any]) -> None:
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window") is not False and not _is_positive(window):
        raise ValueError(f"sliding_window {repr(window)}, which is not a positive number of tokens")
    kinds = config.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise ValueError(f"layer_types {repr(kinds)}, which is not a list of words")
    for key in ("max_window_layers", "sliding_window_pattern", "no_rope_layer_interval"):
        interval = config.get(key)
        if interval is not None and not (_is_positive(interval) or (interval == 0 and key == "max_window_layers")):
            raise ValueError(f"{key} {repr(interval)}, which is not a positive integer")


def _check_experts(config: Mapping[str, Any]) -> None:
    present = [(key, config[key]) for key in EXPERTS if config.get(key) is not None]
    for key, count in present:
        if not _is_positive(count):
            raise ValueError(f"{key} {repr(count)}, which is not a positive integer")
    active = config.get("num_experts_per_tok")
    if present and active is not None and not (_is_positive(active) and active <= present[0][1]):
        raise ValueError(
            f"num_experts_per_tok {repr(active)}, which is not a number from 1 to its {present[0][1]} experts"
        )

"""Number of parameters that a published config describes, without building the model.

Each tied matrix counts once. The heads are those of the class that the config names in `architectures`, because the
published checkpoint holds them. A decoder of an unknown family counts as a llama.
"""

from collections.abc import Callable, Mapping
from reprlib import repr
from typing import Any

from broker.domain.workload import Tower
from broker.model_catalog.unet_parameters import unet
from trainer.contract.architectures import SCALED_ROTARY, position_offset

Config = Mapping[str, Any]
TIED = frozenset({
    "bart", "cohere2", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "smollm3", "starcoder2", "t5",
})  # fmt: skip
"""Families whose word embeddings are tied by default."""

PLAIN_HEADS = frozenset({"falcon", "gpt2", "gpt_bigcode", "gpt_neox"})
"""Families whose heads divide the hidden size. A config's fields for their width and for shared keys are ignored."""
BIASED_MLP = frozenset({"granite", "llama", "smollm3"})
BIASED_ATTENTION = BIASED_MLP | {"cohere2", "gemma", "gemma2", "gemma3_text", "olmo2", "qwen3", "qwen3_moe"}
"""Families whose linear modules have a bias if their config says so."""


def number(c: Config, *keys: str, default: int | None = None) -> int:
    """Return the first of `keys` that the config has. Raise ValueError unless it is a positive integer."""
    for key in keys:
        value = c.get(key)
        if value is not None:
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
            raise ValueError(f"no positive {key}: {repr(value)}")
    if default is not None:
        return default
    raise ValueError(f"no positive {keys[0]}")


MAX_STRETCHED = 10_000


def positions(c: Config) -> int | None:
    """Return the largest number of tokens of a sequence, with rotary scaling as transformers reads it.

    None: the config has no limit. Raise ValueError for an invalid scaling.
    """
    declared = max(0, number(c, "max_position_embeddings", "n_positions", default=0) - position_offset(c)) or None
    rope = c.get("rope_parameters") or c.get("rope_scaling")
    if declared is None or not isinstance(rope, Mapping) or str(c.get("model_type", "")).startswith("gemma3"):
        return declared  # a Gemma 3 scales some layers only, and its own count includes that
    if rope.get("rope_type", rope.get("type")) not in SCALED_ROTARY:
        return declared
    factor = rope.get("factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= MAX_STRETCHED:
        raise ValueError(f"rope_scaling with a factor that is not a number from 0 to {MAX_STRETCHED}: {repr(factor)}")
    return max(declared, int(number(rope, "original_max_position_embeddings", default=declared) * factor))


def is_tied(c: Config) -> bool:
    """Return whether the output layer is the word embedding."""
    declared = c.get("tie_word_embeddings")
    return bool(declared) if declared is not None else c.get("model_type") in TIED


def head_dim(c: Config) -> int:
    """Return the width of one attention head."""
    width = number(c, "hidden_size", "n_embd") // number(c, "num_attention_heads", "n_head")
    is_derived = c.get("model_type") in PLAIN_HEADS or c.get("model_type") == "cohere2"
    return width if is_derived else number(c, "head_dim", default=width)


def kv_heads(c: Config) -> int:
    """Return the heads of keys and values; families with multi-query attention have their own names for it."""
    heads = number(c, "num_attention_heads", "n_head")
    family = c.get("model_type")
    if family == "falcon" and c.get("new_decoder_architecture"):
        return number(c, "num_kv_heads", default=heads)
    if family in ("falcon", "gpt_bigcode") and c.get("multi_query", True):
        return 1
    return heads if family in PLAIN_HEADS else number(c, "num_key_value_heads", default=heads)


def inner(c: Config) -> int:
    """Return the width inside the MLP; older families omit it if it is four times the hidden size."""
    own = {"gpt2": "n_inner", "gpt_bigcode": "n_inner", "falcon": "ffn_hidden_size"}.get(str(c.get("model_type")))
    if own is not None:
        return number(c, own, default=4 * number(c, "hidden_size", "n_embd"))
    return number(c, "intermediate_size", "n_inner", "ffn_hidden_size")


def parameters(c: Config) -> int:
    """Return the parameters of the model that a transformers or diffusers config describes. Raise ValueError."""
    if c.get("_class_name") == "UNet2DConditionModel":
        return unet(c)
    return FAMILIES.get(str(c.get("model_type")), _decoder)(c)


def _embeddings(c: Config) -> int:
    return number(c, "vocab_size") * number(c, "hidden_size", "n_embd") * (1 if is_tied(c) else 2)


def _decoder(c: Config) -> int:
    """Count a llama or a relative: RMS norms, a gated MLP, no learned positions."""
    h, i, d = number(c, "hidden_size"), inner(c), head_dim(c)
    q, kv = number(c, "num_attention_heads") * d, kv_heads(c) * d
    layer = 2 * h * (q + kv) + 2 * h
    if c.get("num_local_experts") or c.get("num_experts"):
        experts = number(c, "num_local_experts", "num_experts")
        layer += experts * (3 * h * number(c, "moe_intermediate_size", default=i) + h)
    else:
        layer += 3 * h * i
    family = c.get("model_type")
    layer += q + 2 * kv + h if c.get("attention_bias") and family in BIASED_ATTENTION else 0
    layer += 2 * i + h if c.get("mlp_bias") and family in BIASED_MLP else 0
    match family:
        case "qwen2":
            layer += q + 2 * kv
        case "qwen3" | "qwen3_moe":
            layer += 2 * d
        case "gemma2":
            layer += 2 * h
        case "olmo2":
            layer += q + kv
        case "cohere2":  # one norm for attention and MLP
            layer -= h
        case "gemma3_text":
            layer += 2 * h + 2 * d
    return _embeddings(c) + h + number(c, "num_hidden_layers") * layer


def _linear(inputs: int, outputs: int, *, bias: bool = True) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _attention(h: int, q: int, kv: int, *, bias: bool = True) -> int:
    return _linear(h, q + 2 * kv, bias=bias) + _linear(q, h, bias=bias)


def _mlp(h: int, i: int, *, bias: bool = True) -> int:
    return _linear(h, i, bias=bias) + _linear(i, h, bias=bias)


def _layer(h: int, i: int) -> int:
    """Count a transformer layer with biases everywhere and two layer norms."""
    return _attention(h, h, h) + _mlp(h, i) + 4 * h


def _plain(c: Config, *, norms: int, bias: bool) -> int:
    """Count layers with an MLP of two matrices; `norms`: layer norms in each, all with a bias."""
    h, i, d = number(c, "hidden_size", "n_embd"), inner(c), head_dim(c)
    q, kv = number(c, "num_attention_heads", "n_head") * d, kv_heads(c) * d
    layer = _attention(h, q, kv, bias=bias) + _mlp(h, i, bias=bias) + norms * 2 * h
    return number(c, "num_hidden_layers", "n_layer") * layer + 2 * h


def _gpt(c: Config) -> int:
    """Count GPT-2 or BigCode, which have learned positions."""
    positions = number(c, "n_positions", "max_position_embeddings", default=1024)
    return _plain(c, norms=2, bias=True) + _embeddings(c) + positions * number(c, "n_embd", "hidden_size")


def _neox(c: Config) -> int:
    spared = 0 if c.get("attention_bias", True) else 4 * number(c, "hidden_size") * number(c, "num_hidden_layers")
    return _plain(c, norms=2, bias=True) + _embeddings(c) - spared


def _phi(c: Config) -> int:
    """Count a Phi: one norm for attention and MLP; the output layer has a bias."""
    norms = 4 * head_dim(c) * number(c, "num_hidden_layers") if c.get("qk_layernorm") else 0
    return _plain(c, norms=1, bias=True) + _embeddings(c) + number(c, "vocab_size") + norms


def _falcon(c: Config) -> int:
    shared = c.get("parallel_attn", True) and not c.get("new_decoder_architecture")
    return _plain(c, norms=1 if shared else 2, bias=bool(c.get("bias", False))) + _embeddings(c)


def _starcoder2(c: Config) -> int:
    return _plain(c, norms=2, bias=bool(c.get("use_bias", True))) + _embeddings(c)


def _t5(c: Config) -> int:
    d, f = number(c, "d_model"), number(c, "d_ff")
    width = number(c, "num_heads") * number(c, "d_kv")
    gated = "gated" in str(c.get("feed_forward_proj", "relu"))
    attention, mlp = 4 * d * width, (3 if gated else 2) * d * f
    layers = number(c, "num_layers")
    encoder = layers * (attention + mlp + 2 * d) + d
    decoder = number(c, "num_decoder_layers", default=layers) * (2 * attention + mlp + 3 * d) + d
    biases = 2 * number(c, "relative_attention_num_buckets", default=32) * number(c, "num_heads")
    tied = 1 if c.get("tie_word_embeddings", True) else 2
    return encoder + decoder + biases + tied * number(c, "vocab_size") * d


def _cross_layer(d: int, f: int) -> int:
    return _layer(d, f) + _attention(d, d, d) + 2 * d


def _bart(c: Config) -> int:
    """Count a BART: positions begin at two, both embeddings have norms, and the output layer is the embedding."""
    d = number(c, "d_model")
    encoder = number(c, "encoder_layers") * _layer(d, number(c, "encoder_ffn_dim"))
    decoder = number(c, "decoder_layers") * _cross_layer(d, number(c, "decoder_ffn_dim"))
    positions = 2 * (number(c, "max_position_embeddings") + 2) * d
    return number(c, "vocab_size") * d + positions + 4 * d + encoder + decoder


def _whisper(c: Config) -> int:
    """Count a Whisper: two convolutions, then BART's layers, whose keys have no bias."""
    d, mel = number(c, "d_model"), number(c, "num_mel_bins", default=80)
    encoder = 3 * mel * d + d + 3 * d * d + d + number(c, "max_source_positions") * d + 2 * d
    encoder += number(c, "encoder_layers") * (_layer(d, number(c, "encoder_ffn_dim")) - d)
    decoder = (number(c, "vocab_size") + number(c, "max_target_positions")) * d + 2 * d
    decoder += number(c, "decoder_layers") * (_cross_layer(d, number(c, "decoder_ffn_dim")) - 2 * d)
    return encoder + decoder


def _built_as(c: Config, what: str) -> bool:
    return any(what in str(name) for name in c.get("architectures") or ())


def _bert(c: Config) -> int:
    """Count a BERT or RoBERTa. A masked-language head is a dense layer, a norm and a bias, and replaces the pooler."""
    h, v = number(c, "hidden_size"), number(c, "vocab_size")
    total = (v + number(c, "max_position_embeddings") + number(c, "type_vocab_size", default=2)) * h + 2 * h
    total += number(c, "num_hidden_layers") * _layer(h, number(c, "intermediate_size"))
    if not _built_as(c, "ForMaskedLM"):
        total += _linear(h, h)
    if _built_as(c, "ForPreTraining"):
        total += 2 * h + 2
    if _built_as(c, "ForMaskedLM") or _built_as(c, "ForPreTraining"):
        total += _linear(h, h) + 2 * h + v
    return total


def _distilbert(c: Config) -> int:
    h, v = number(c, "dim"), number(c, "vocab_size")
    total = (v + number(c, "max_position_embeddings")) * h + 2 * h
    total += number(c, "n_layers") * _layer(h, number(c, "hidden_dim"))
    return total + (_linear(h, h) + 2 * h + v if _built_as(c, "ForMaskedLM") else 0)


def _patches(c: Config) -> tuple[int, int]:
    """Return (positions, parameters of the first convolution) of a vision transformer."""
    patch = number(c, "patch_size")
    side = number(c, "image_size") // patch
    return side * side, _linear(number(c, "num_channels", default=3) * patch * patch, number(c, "hidden_size"))


def _vit(c: Config) -> int:
    h = number(c, "hidden_size")
    positions, convolution = _patches(c)
    total = convolution + h + (positions + 1) * h + 2 * h
    total += number(c, "num_hidden_layers") * _layer(h, number(c, "intermediate_size"))
    return total + (_linear(h, number(c, "num_labels")) if _built_as(c, "Classification") else _linear(h, h))


def _gemma3(c: Config) -> int:
    """Count a text decoder after a SigLIP tower, with a matrix and a norm from the patches to the decoder's width."""
    text, vision = c.get("text_config"), c.get("vision_config")
    if not isinstance(text, Mapping) or not isinstance(vision, Mapping):
        raise ValueError("no text_config with a vision_config")
    return _decoder(text) + siglip_tower(vision, number(text, "hidden_size")).parameters


def siglip_tower(vision: Config, width: int) -> Tower:
    """Return a SigLIP tower with a matrix and a norm from its patches to a decoder of that width. Raise ValueError."""
    h, i, layers = (number(vision, key) for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    positions, convolution = _patches(vision)
    pooled = _layer(h, i) - h if vision.get("vision_use_head", True) else 0  # a query of its own, and one norm
    return Tower(
        parameters=convolution + positions * h + 2 * h + layers * _layer(h, i) + pooled + h * width + h,
        matrices=layers * (4 * h * h + 2 * h * i),
        sides=layers * (4 * 2 * h + 2 * (h + i)),
    )


FAMILIES: Mapping[str, Callable[[Config], int]] = {
    "bart": _bart,
    "bert": _bert,
    "distilbert": _distilbert,
    "falcon": _falcon,
    "gemma3": _gemma3,
    "gpt2": _gpt,
    "gpt_bigcode": _gpt,
    "gpt_neox": _neox,
    "phi": _phi,
    "roberta": _bert,
    "starcoder2": _starcoder2,
    "t5": _t5,
    "vit": _vit,
    "whisper": _whisper,
}
"""Families that are not relatives of llama."""

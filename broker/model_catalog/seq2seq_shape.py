"""Shapes of encoder-decoders over texts: T5 and its relatives, BART."""

from collections.abc import Mapping
from typing import Any

from broker.domain.workload import ModelShape
from broker.model_catalog import parameter_count


def pair_shape(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of an encoder-decoder with a language model head. Raise ValueError for an unusable config."""
    family = str(config["model_type"])
    return ModelShape(name=name, family=family, known=True, **(_t5 if family == "t5" else _bart)(config))


def _rate(config: Mapping[str, Any], field: str, default: float) -> bool:
    rate = config.get(field, default)
    return isinstance(rate, int | float) and rate > 0


def _t5(c: Mapping[str, Any]) -> dict[str, Any]:
    heads, layers, inner = (
        parameter_count.number(c, "num_heads"),
        parameter_count.number(c, "num_layers"),
        parameter_count.number(c, "d_ff"),
    )
    kind = str(c.get("feed_forward_proj") or "relu")
    dropped = _rate(c, "dropout_rate", 0.1)
    return {
        "layers": layers,
        "decoder_layers": parameter_count.number(c, "num_decoder_layers", default=layers),
        "hidden": parameter_count.number(c, "d_model"),
        "intermediate": inner,
        "decoder_intermediate": inner,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": parameter_count.number(c, "d_kv"),
        "vocabulary": parameter_count.number(c, "vocab_size"),
        "tied_embeddings": c.get("tie_word_embeddings") is not False,
        "parameters": parameter_count.parameters(c),
        "gated_mlp": kind.startswith("gated-"),
        "activation": "gelu_new" if kind == "gated-gelu" else kind.rpartition("-")[2],
        "dropout": dropped,
        "inner_dropout": dropped,
        "attention_dropout": dropped,
        "buckets": parameter_count.number(c, "relative_attention_num_buckets", default=32),
    }


def _bart(c: Mapping[str, Any]) -> dict[str, Any]:
    h, heads = parameter_count.number(c, "d_model"), parameter_count.number(c, "encoder_attention_heads")
    if parameter_count.number(c, "decoder_attention_heads", default=heads) != heads:
        raise ValueError("other heads in its decoder than in its encoder")
    if h % heads:
        raise ValueError(f"a d_model of {h}, which {heads} heads do not divide")
    positions = parameter_count.number(c, "max_position_embeddings")
    return {
        "layers": parameter_count.number(c, "encoder_layers"),
        "decoder_layers": parameter_count.number(c, "decoder_layers"),
        "hidden": h,
        "intermediate": parameter_count.number(c, "encoder_ffn_dim"),
        "decoder_intermediate": parameter_count.number(c, "decoder_ffn_dim"),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": h // heads,
        "vocabulary": parameter_count.number(c, "vocab_size"),
        "tied_embeddings": True,
        "parameters": parameter_count.parameters(c),
        "gated_mlp": False,
        "activation": str(c.get("activation_function") or "gelu"),
        "dropout": _rate(c, "dropout", 0.1),
        "inner_dropout": _rate(c, "activation_dropout", 0.0),
        "attention_dropout": _rate(c, "attention_dropout", 0.0),
        "max_positions": positions,
        "looked_up": (positions + 2,),
    }

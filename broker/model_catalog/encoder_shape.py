"""Shapes of encoders with a head: BERT, RoBERTa, DistilBERT, and ViT."""

from collections.abc import Mapping
from typing import Any, Literal

from broker.domain.workload import ModelShape
from broker.model_catalog import parameter_count
from trainer.contract.architectures import position_offset

ENCODERS = frozenset({"bert", "roberta", "distilbert", "vit"})
HEADS: Mapping[str, Literal["text", "words"]] = {"text_classification": "text", "token_classification": "words"}
"""Tasks that put a head onto a text encoder."""


def encoder_shape(name: str, config: Mapping[str, Any], task: str = "text_classification") -> ModelShape:
    """Return the shape of an encoder with the task's head. Raise ValueError."""
    family = str(config["model_type"])
    c = dict(config)
    if family == "distilbert":
        same = {"hidden_size": "dim", "intermediate_size": "hidden_dim"}
        same |= {"num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "hidden_dropout_prob": "dropout"}
        c |= {ours: config[theirs] for ours, theirs in same.items() if theirs in config}
    head = "image" if family == "vit" else HEADS[task]
    h, heads = parameter_count.number(c, "hidden_size"), parameter_count.number(c, "num_attention_heads")
    if h % heads:
        raise ValueError(f"a hidden_size of {h}, which {heads} heads do not divide")
    labels = labels_of(c)
    dense = h * h + h if head == "text" else 0
    head_weights = h * labels + labels + (dense if family != "bert" else 0)
    rate = c.get("hidden_dropout_prob", 0.0 if family == "vit" else 0.1)
    return ModelShape(
        name=name,
        family=family,
        layers=parameter_count.number(c, "num_hidden_layers"),
        hidden=h,
        intermediate=parameter_count.number(c, "intermediate_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=h // heads,
        tied_embeddings=True,
        parameters=_body(family, c) + dense + h * labels + labels,
        known=True,
        gated_mlp=False,
        activation=str(c.get("hidden_act") or c.get("activation") or "gelu"),
        dropout=isinstance(rate, int | float) and rate > 0,
        head=head,
        labels=labels,
        head_parameters=head_weights,
        pooled_adapter=family == "bert" and head == "text",
        **_inputs(family, c),
    )


def labels_of(c: Mapping[str, Any]) -> int:
    """Return the number of classes that the config names; transformers' default is two. Raise ValueError."""
    named = c.get("id2label")
    return parameter_count.number(c, "num_labels", default=len(named) if isinstance(named, Mapping) and named else 2)


def _body(family: str, c: Mapping[str, Any]) -> int:
    """Return the parameters without pooler and head."""
    h = parameter_count.number(c, "hidden_size")
    if family == "vit":
        return (
            parameter_count.parameters({**c, "architectures": ["ViTForImageClassification"], "num_labels": 1}) - h - 1
        )
    total = parameter_count.parameters({**c, "architectures": []})
    return total if family == "distilbert" else total - h * h - h


def _inputs(family: str, c: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of the embeddings; a ViT's words are its patches."""
    if family == "vit":
        patch, channels = parameter_count.number(c, "patch_size"), parameter_count.number(c, "num_channels", default=3)
        side = parameter_count.number(c, "image_size")
        tokens = (side // patch) ** 2 + 1
        return {"vocabulary": channels * patch * patch, "max_positions": tokens, "pixels": channels * side * side}
    positions = parameter_count.number(c, "max_position_embeddings")
    types = () if family == "distilbert" else (parameter_count.number(c, "type_vocab_size", default=2),)
    usable = positions - position_offset({**c, "model_type": family})
    looked_up = (positions, *types)
    return {"vocabulary": parameter_count.number(c, "vocab_size"), "max_positions": usable, "looked_up": looked_up}

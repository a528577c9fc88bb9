"""Which kind of model a task takes, by the model's config.json: one rule for the broker and for the trainer."""

from collections.abc import Mapping, Sequence
from typing import Any

NEXT_TOKEN = ("causal_lm", "dpo")
"""Tasks whose loss is that of the next token, which the model may not see."""
QUANTISED = "is quantised; give the model that it was made from"
"""Weights by GPTQ, AWQ and the like are neither trained nor merged into; QLoRA quantises those that were published."""
BOTH_WAYS = frozenset({
    "albert", "bert", "bert-generation", "big_bird", "camembert", "convbert", "data2vec-text", "deberta",
    "deberta-v2", "distilbert", "electra", "ernie", "esm", "esmc", "eurobert", "flaubert", "fnet", "funnel",
    "ibert", "jina_embeddings_v3", "layoutlm", "longformer", "luke", "megatron-bert", "mobilebert", "modernbert",
    "modernvbert", "mpnet", "mra", "neomme", "nomic_bert", "nystromformer", "perceiver", "reformer", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "squeezebert", "tapas", "xlm", "xlm-roberta",
    "xlm-roberta-xl", "xlnet", "xmod", "yoso",
})  # fmt: skip
"""Kinds that read a text in both directions, if their config.json does not say otherwise; transformers has many of them
as language models too, without a word about it."""


def misuse(task: str, config: Mapping[str, Any]) -> str | None:
    """Why the task takes no such model, as what follows on its name; None where the config does not tell."""
    kind, pair = config.get("model_type"), bool(config.get("is_encoder_decoder"))
    if task == "seq2seq" and not pair:
        return f"is of the kind {kind}; task seq2seq takes an encoder-decoder, such as t5 or bart"
    if task != "seq2seq" and pair:
        return f"is of the kind {kind}; task {task} takes no encoder-decoder, seq2seq does"
    if task in NEXT_TOKEN and _sees_ahead(config):
        wanted = "a decoder, such as llama or gpt2"
        return f"is of the kind {kind} and sees what it is to predict; task {task} takes {wanted}"
    return QUANTISED if is_quantised(config) else None


def is_quantised(config: Mapping[str, Any]) -> bool:
    """Whether the weights are no plain numbers."""
    return any(one.get("quantization_config") for one in _parts(config))


def _parts(config: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The config, and the one of its language model where that is another."""
    inner = config.get("text_config")
    return (config, inner) if isinstance(inner, Mapping) else (config,)


def _sees_ahead(config: Mapping[str, Any]) -> bool:
    if any(one.get("use_bidirectional_attention") in (True, "all") for one in _parts(config)):  # of Gemma's
        return True
    kind = config.get("model_type")
    causal = config.get("is_decoder") or (kind == "xlm" and config.get("causal")) or config.get("attn_type") == "uni"
    return kind in BOTH_WAYS and not causal


STRETCHED = ("linear", "dynamic", "yarn")
"""Kinds of rotary positions that multiply how far a model reaches; `llama3` and `longrope` have counted it already."""

"""Model kinds that a task accepts, judged by the model's config.json; broker and trainer share the rule."""

from collections.abc import Mapping, Sequence
from typing import Any

NEXT_TOKEN = ("causal_lm", "dpo", "orpo", "kto")
"""Tasks that predict the next token; the model must not attend to later tokens."""
QUANTISED = "is quantised; give the model that it was made from"
"""Error for quantised weights (GPTQ, AWQ). They cannot be trained or merged into; QLoRA quantises published weights."""
QUANTISED_EXPERTS = "qlora quantises linear modules only, and the experts of a mixture are not linear; use lora"
"""Error for QLoRA of a mixture of experts, in the estimate, the daemon's checks, the preflight and the trainer."""
NEEDS_LORA = "trains a LoRA, since the model under its adapters is the reference; use lora"
"""Error for a full fine-tune by a task of REFERENCED; it follows the task's name."""
REFERENCED = ("dpo", "kto")
"""Tasks that compare the model with a reference, which is the model without its adapters."""
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in config.json. A family that allows one expert or none has no mixture then."""
BIDIRECTIONAL = frozenset({
    "albert", "bert", "bert-generation", "big_bird", "camembert", "convbert", "data2vec-text", "deberta",
    "deberta-v2", "distilbert", "electra", "ernie", "esm", "esmc", "eurobert", "flaubert", "fnet", "funnel",
    "gte", "ibert", "jina_embeddings_v3", "layoutlm", "longformer", "luke", "megatron-bert", "mobilebert", "modernbert",
    "modernvbert", "mpnet", "mra", "neomme", "nomic_bert", "nystromformer", "perceiver", "reformer", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "squeezebert", "tapas", "ultrabert",
    "ultravbert", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod", "yoso",
})  # fmt: skip
"""Values of `model_type` whose models attend in both directions unless their config.json says otherwise.
transformers also loads many of them as language models, without a warning.
"""


def model_misuse_message(task: str, config: Mapping[str, Any]) -> str | None:
    """Return why the task does not accept the model, worded to follow the model's name.

    Return None if config.json gives no reason.
    """
    kind, pair = config.get("model_type"), bool(config.get("is_encoder_decoder"))
    if task == "seq2seq" and not pair:
        return f"is of the kind {kind}; task seq2seq takes an encoder-decoder, such as t5 or bart"
    if task != "seq2seq" and pair:
        return f"is of the kind {kind}; task {task} takes no encoder-decoder, seq2seq does"
    if task in NEXT_TOKEN and _is_bidirectional(config):
        expected = "a decoder, such as llama or gpt2"
        return f"is of the kind {kind} and sees what it is to predict; task {task} takes {expected}"
    return QUANTISED if is_quantised(config) else None


def is_quantised(config: Mapping[str, Any]) -> bool:
    """Return True if the weights are quantised, so not plain numbers."""
    return any(part.get("quantization_config") for part in _configs_of(config))


def is_mixture(config: Mapping[str, Any]) -> bool:
    """Return True if config.json gives the model, its language model or its feed-forward part several experts."""
    feed_forward = config.get("ffn_config")  # of DBRX
    parts = (*_configs_of(config), feed_forward if isinstance(feed_forward, Mapping) else {})
    counts = [part.get(name) for part in parts if _may_have_experts(part) for name in EXPERT_COUNTS]
    return any(isinstance(count, int) and count > 1 for count in counts)


def _may_have_experts(part: Mapping[str, Any]) -> bool:
    """Return False for a Nemotron-H without layers of experts: its config gives their number all the same."""
    kinds = part.get("hybrid_override_pattern") or part.get("layers_block_type")
    if part.get("model_type") != "nemotron_h" or not isinstance(kinds, str | list):
        return True
    return "E" in kinds or "moe" in kinds


def _configs_of(config: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the config, followed by the config of its language model if that is a separate part."""
    inner = config.get("text_config")
    return (config, inner) if isinstance(inner, Mapping) else (config,)


def _is_bidirectional(config: Mapping[str, Any]) -> bool:
    if any(part.get("use_bidirectional_attention") in (True, "all") for part in _configs_of(config)):  # of Gemma's
        return True
    kind = config.get("model_type")
    causal = config.get("is_decoder") or (kind == "xlm" and config.get("causal")) or config.get("attn_type") == "uni"
    return kind in BIDIRECTIONAL and not causal


SCALED_ROTARY = ("linear", "dynamic", "yarn")
"""Kinds of rotary positions whose factor multiplies a model's longest sequence. `llama3` and `longrope` include the
factor in their limit.
"""

AFTER_PADDING = frozenset({
    "camembert", "data2vec-text", "ibert", "lilt", "longformer", "luke", "markuplm", "mpnet", "roberta",
    "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip
"""Values of `model_type` whose positions begin after the padding token's id, so that the table has unused ones."""


def position_offset(config: Mapping[str, Any]) -> int:
    """Return the number of positions in a model's table before that of a row's first token."""
    if str(config.get("model_type")) not in AFTER_PADDING:
        return 0
    padding = config.get("pad_token_id")
    return (padding if isinstance(padding, int) and not isinstance(padding, bool) else 1) + 1

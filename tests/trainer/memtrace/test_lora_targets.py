"""`--lora-targets` trains the modules that peft makes trainable, over transformers' own classes."""

from typing import Any

import peft
import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from broker.sizing.estimate import EstimateError, estimate, targets_of

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128, "pad_token_id": 0}
LLAMA = SIZES | {"intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 64}
GPT = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128, "n_positions": 64, "pad_token_id": 0}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 128}
BART = {
    "d_model": 64, "encoder_layers": 3, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "gemma3_text", "phi3", "starcoder2", "phi"), LLAMA),
    "falcon": SIZES,
    "gpt_neox": SIZES | {"intermediate_size": 96},
    "gpt2": GPT,
    "bert": SIZES | {"intermediate_size": 96},
    "roberta": SIZES | {"intermediate_size": 96},
    "t5": T5,
    "bart": BART,
}
TARGETS = (
    "all-linear", "q_proj,v_proj", "self_attn.q_proj,foo", r".*\.(q|v)_proj", r".*attn.*", r".*(query|value)$",
    "lm_head", r"(.*\.)?lm_head", "embed_tokens,q_proj", "dense", "attention.output.dense", "c_proj", "mlp.c_proj",
    "c_attn,wte", "query_key_value", "embed_in,dense", "q", "EncDecAttention.q", "SelfAttention.q,wo", "fc1,out_proj",
    "encoder_attn.out_proj", "qkv_proj,down_proj", "mlp",
)  # fmt: skip
CLASSES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("t5", "bart"), (AutoModelForSeq2SeqLM, "SEQ_2_SEQ_LM")),
    **dict.fromkeys(("bert", "roberta"), (AutoModelForSequenceClassification, "SEQ_CLS")),
}
NOT_ESTIMATED = {"t5": ("lm_head", "embed_tokens"), "bart": ("lm_head", "embed_tokens")}
"""Modules that peft adapts and `estimate` refuses with a message, by family."""


def trained_by_peft(config: Any, family: str, said: str) -> int | None:
    """Return parameters that want a gradient; None where peft refuses."""
    made, kind = CLASSES.get(family, (AutoModelForCausalLM, "CAUSAL_LM"))
    with torch.device("meta"):
        model = made.from_config(config)
    targets = targets_of(said)
    wanted = "all-linear" if targets == ("all-linear",) else targets if isinstance(targets, str) else list(targets)
    try:
        lora = peft.LoraConfig(r=8, target_modules=wanted, task_type=kind)
        adapted = peft.get_peft_model(model, lora, low_cpu_mem_usage=True)
    except ValueError:
        return None
    return sum(p.numel() for p in adapted.parameters() if p.requires_grad)


@pytest.mark.parametrize("family", CONFIGS)
def test_targets_train_what_peft_would(family: str) -> None:
    config = CONFIG_MAPPING[family](**CONFIGS[family])
    compared = 0
    for said in TARGETS:
        there = trained_by_peft(config, family, said)
        try:
            here = estimate(config=config.to_dict(), lora_targets=said, lora_r=8, seq=16)["trainable_parameters"]
        except EstimateError as refused:
            here = None
            if "whose adapter is not estimated" in str(refused):
                assert any(name in said for name in NOT_ESTIMATED[family]), said
                continue
        assert here == there, said
        compared += here is not None
    assert compared >= 2

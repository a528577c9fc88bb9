"""Tiny models of every kind, built from their configuration classes, with the tiny tokenizer."""

from pathlib import Path
from typing import Any

WORDS = 200


def tokenizer(**special: str) -> Any:
    """Return words `w0`, `w1`, … of which each is one token; pad 0, unknown 1, end 2."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<unk>": 1, "<eos>": 2, **{f"w{i}": i + 3 for i in range(WORDS - 3)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names | special)


BERT: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def bert(folder: Path) -> Path:
    """Return a masked language model without a pooler and a head."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(1)
    BertForMaskedLM(BertConfig(**BERT)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def roberta(folder: Path) -> Path:
    """Write a model like `bert`, with a head of two layers."""
    import torch
    from transformers import RobertaConfig, RobertaForMaskedLM

    torch.manual_seed(1)
    RobertaForMaskedLM(RobertaConfig(**BERT)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def llama(folder: Path) -> Path:
    """Return a language model, whose tokenizer has no padding of its own."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        eos_token_id=2, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def causal(kind: str, folder: Path) -> Path:
    """Return a language model of one of FAMILIES, as its published ones are built, but for the sizes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None}
    config = AutoConfig.for_model(kind, **sizes, **special, **FAMILIES[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


GATED: dict[str, Any] = {"intermediate_size": 64, "num_key_value_heads": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "falcon": {"hidden_dropout": 0.1, "attention_dropout": 0.1, "multi_query": True, "parallel_attn": True},
    "mistral": {**GATED, "sliding_window": 8},
    "mixtral": {**GATED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma": {**GATED, "head_dim": 16},
}
"""Config of each family in addition to the common sizes. Falcon has one head of keys, parallel layers and dropout.
Mistral has a window that is shorter than the longest rows. Mixtral has experts, of which each token takes two. Gemma
has its own head width and ties its embeddings to its head."""


def vit(folder: Path) -> Path:
    """Write an untrained model for pictures of 8 x 8 pixels in patches of 4, with dropout, and its image processor."""
    import torch
    from transformers import ViTConfig, ViTModel
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    torch.manual_seed(1)
    config = ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4,
        hidden_dropout_prob=0.1, initializer_range=0.2,
    )  # fmt: skip
    ViTModel(config, add_pooling_layer=False).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder)
    return folder


SMALL: dict[str, Any] = {"vocab_size": WORDS, "d_model": 32, "pad_token_id": 0, "eos_token_id": 2}


def t5(folder: Path) -> Path:
    """Return a T5 with dropout everywhere and tied embeddings."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(1)
    own: dict[str, Any] = {"d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    config = T5Config(**own, **SMALL)
    T5ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def bart(folder: Path) -> Path:
    """Write a model with its own start token and learned positions."""
    import torch
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(1)
    sides: dict[str, Any] = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in
             (("layers", 1), ("ffn_dim", 64), ("attention_heads", 2))}  # fmt: skip
    config = BartConfig(
        max_position_embeddings=64, decoder_start_token_id=2, bos_token_id=2, forced_eos_token_id=None, **sides, **SMALL
    )
    BartForConditionalGeneration(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder

"""Configurations in which this trainer is compared with TRL and HF Trainer: tiny models, rows and settings."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

from tests.trainer.support import tokenizers

CHATML = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
NOUNS = ("harbour", "boats", "light", "price", "bread", "tailor", "cloth", "morning", "loaves", "user")
TOOLS = [{"type": "function", "function": {"name": "tide", "description": "Height.", "parameters": {}}}]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT = {**SIZES, "max_position_embeddings": 128, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0,
      "decoder_start_token_id": 0, "pad_token_id": 0}  # fmt: skip
VIT = {**SIZES, "image_size": 8, "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
STEPS = 3
BATCH = 4


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    """One configuration."""

    name: str
    peer: str
    """Class of TRL or transformers that trains it too."""
    family: str
    sizes: Mapping[str, Any]
    tokenizer: Callable[[], Any] | None
    data: Mapping[str, Any]
    """Settings of `train.data`."""
    rows: Callable[[int], dict[str, Any]]
    """Row by number, in this trainer's columns."""
    theirs: Callable[[dict[str, Any]], dict[str, Any]]
    """Row in the peer's columns."""
    architecture: str = "AutoModelForCausalLM"
    template: str | None = None
    train: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of `train`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the peer."""

    def write_model(self, folder: Path) -> None:
        """Write the model and its tokenizer."""
        torch.manual_seed(3)
        sizes = dict(self.sizes)
        if self.tokenizer is None:
            from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

            ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder)
        else:
            tokenizer = self.tokenizer()
            tokenizer.chat_template = self.template
            tokenizer.save_pretrained(folder)
            special = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
            sizes = {"pad_token_id": tokenizer.pad_token_id, **special, **sizes, "vocab_size": len(tokenizer)}
        config = transformers.AutoConfig.for_model(self.family, **sizes)
        getattr(transformers, self.architecture).from_config(config).save_pretrained(folder)

    def write_rows(self, folder: Path) -> tuple[Path, str]:
        """Write the data set; return its path and its format."""
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps(self.rows(n)) + "\n" for n in range(BATCH * STEPS)))
        return path, "jsonl"


def _noun(number: int, step: int = 1) -> str:
    return NOUNS[number * step % len(NOUNS)]


def _words(number: int) -> dict[str, Any]:
    long = " ".join(_noun(number + n, 3) for n in range(1 + number % 5))
    return {"word": _noun(number), "meaning": f"The {long} lay still."}


def _turns(number: int) -> dict[str, Any]:
    """Return a chat of one to three answers."""
    turns = []
    for n in range(1 + number % 3):
        turns += [{"role": "user", "content": f"What is the {_noun(number + n)}?"}]
        turns += [{"role": "assistant", "content": f"The {_noun(number + n, 3)} was quiet."}]
    return {"messages": turns}


def _pair(number: int) -> dict[str, Any]:
    words = _words(number)
    return {"prompt": f"Word: {words['word']}\n", "chosen": words["meaning"], "rejected": f"A {_noun(number, 7)}."}


def _dialogue(number: int) -> dict[str, Any]:
    """Return a pair in the form of HH-RLHF: each answer is the whole dialogue."""
    start = f"The user: what is the {_noun(number)}?\nThe tailor:"
    return {"chosen": f"{start} The {_noun(number, 3)} lay still.", "rejected": f"{start} A {_noun(number, 7)}."}


def _rated(number: int) -> dict[str, Any]:
    pair = _pair(number)
    return {"prompt": pair["prompt"], "completion": pair[("chosen", "rejected")[number % 2]], "label": number % 2 == 0}


def _classed(number: int) -> dict[str, Any]:
    return {"text": _words(number)["meaning"], "mood": ("bad", "fine", "good")[number % 3]}


def _number(number: int) -> dict[str, Any]:
    return {"text": _words(number)["meaning"], "score": number / 8}


def _tagged(number: int) -> dict[str, Any]:
    words = _words(number)["meaning"].split()
    return {"words": words, "tags": [("B-X", "O", "O")[(n + number) % 3] for n in range(len(words))]}


def _picture(number: int) -> dict[str, Any]:
    pixels = [[[(number * 31 + x * y) % 256, x * 9, y * 9] for x in range(8)] for y in range(8)]
    return {"image": pixels, "label": ("dark", "light")[number % 2]}


def picture_of(cell: Any) -> Image.Image:
    """Return the picture of a row of pixels."""
    import numpy as np

    return Image.fromarray(np.asarray(cell, dtype=np.uint8))


COMPLETION = {"prompt": "Define {word}:\n", "completion": "{meaning}"}


def _completion(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": f"Define {row['word']}:\n", "completion": row["meaning"]}


def _as_it_is(row: dict[str, Any]) -> dict[str, Any]:
    return row


def _last(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}


def _sft(name: str, tokenizer: Callable[[], Any], **more: Any) -> ParityCase:
    base: dict[str, Any] = {
        "peer": "SFTTrainer", "family": "llama", "sizes": {**SIZES, "num_key_value_heads": 1}, "data": COMPLETION,
        "rows": _words, "theirs": _completion,
    }  # fmt: skip
    return ParityCase(**base | {"name": name, "tokenizer": tokenizer} | more)


def _legacy() -> Any:
    return tokenizers.sentence_pieces(legacy=True)


def _modern() -> Any:
    return tokenizers.sentence_pieces(legacy=False)


def _ended() -> Any:
    """Return a unigram model that ends a text with its end token, as T5's does."""
    from tokenizers import processors

    tokenizer = tokenizers.unigram()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.eos_token_id)]
    )
    return tokenizer


def _headed(name: str, task: str, architecture: str, **more: Any) -> ParityCase:
    base: dict[str, Any] = {
        "peer": "Trainer", "family": "bert", "sizes": BERT, "tokenizer": tokenizers.word_pieces, "theirs": _as_it_is,
        "train": {"task": task}, "architecture": architecture,
    }  # fmt: skip
    return ParityCase(**base | {"name": name} | more)


CHAT: dict[str, Any] = {"data": {"messages": "messages"}, "rows": _turns, "template": CHATML, "theirs": _as_it_is}
ALL: dict[str, Any] = {**CHAT, "options": {"assistant_only_loss": True}}
LORA = {"method": {"kind": "lora", "r": 4, "dropout": 0}}
PAIRS = {"prompt": "{prompt}", "chosen": "{chosen}", "rejected": "{rejected}"}
CASES = (
    _sft("byte-level", tokenizers.byte_level),
    _sft("dummy prefix", _legacy),
    _sft("no dummy prefix, cut", _modern, train={"max_length": 24}),
    _sft("unigram, accumulated", tokenizers.unigram, train={"micro_batch": 1}),
    _sft("LoRA, GPT-2", tokenizers.byte_level, family="gpt2", sizes=GPT2, train=LORA),
    _sft("packed against separate rows", tokenizers.byte_level, train={"packing": True, "max_length": 96}),
    _sft(
        "window, Gemma 3",
        _modern,
        family="gemma3_text",
        sizes={**SIZES, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8},
    ),
    _sft(
        "texts without prompt", _legacy, data={"completion": "{meaning}"}, theirs=lambda row: {"text": row["meaning"]}
    ),
    _sft(
        "mixture with router loss",
        tokenizers.byte_level,
        family="mixtral",
        sizes={
            **SIZES,
            "num_key_value_heads": 1,
            "num_local_experts": 4,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.1,
        },
    ),
    _sft("all answers", tokenizers.byte_level, **ALL),
    _sft("all answers, dummy prefix", _legacy, **ALL),
    _sft(
        "last answer",
        tokenizers.byte_level,
        **CHAT | {"data": {"messages": "messages", "learn": "last"}, "template": PLAIN, "theirs": _last},
    ),
    _sft(
        "tools",
        tokenizers.byte_level,
        **ALL
        | {
            "rows": lambda n: {**_turns(n), "tools": TOOLS},
            "theirs": lambda row: {**row, "tools": json.dumps(row["tools"])},
        },
    ),
    _sft(
        "DPO",
        tokenizers.byte_level,
        peer="DPOTrainer",
        data=PAIRS,
        rows=_pair,
        theirs=_as_it_is,
        train={"task": "dpo", **LORA},
    ),
    _sft(
        "ORPO",  # TRL averages the cross-entropy over the tokens of a micro-batch, this trainer over those of a pair
        _legacy,
        peer="ORPOTrainer",
        data=PAIRS,
        rows=_pair,
        theirs=_as_it_is,
        train={"task": "orpo", "micro_batch": 1},
    ),
    _sft(
        "ORPO, dialogues without prompt",
        _legacy,
        peer="ORPOTrainer",
        data={"chosen": "{chosen}", "rejected": "{rejected}"},
        rows=_dialogue,
        theirs=_as_it_is,
        train={"task": "orpo", "micro_batch": 1},
    ),
    _sft(
        "KTO",
        tokenizers.byte_level,
        peer="KTOTrainer",
        data={"prompt": "{prompt}", "completion": "{completion}", "label": "label"},
        rows=_rated,
        theirs=_as_it_is,
        train={"task": "kto", "kto": {"undesirable_weight": 1.5}, "optim": {"lr": 0.03}, **LORA},
        options={"undesirable_weight": 1.5},
    ),
    _sft(
        "reward model",
        tokenizers.byte_level,
        peer="RewardTrainer",
        data=PAIRS,
        rows=_pair,
        theirs=_as_it_is,
        architecture="AutoModelForSequenceClassification",
        train={"task": "reward_model"},
    ),
    _headed(
        "classes",
        "text_classification",
        "AutoModelForSequenceClassification",
        rows=_classed,
        data={"prompt": "{text}", "label": "mood"},
    ),
    _headed(
        "numbers",
        "text_regression",
        "AutoModelForSequenceClassification",
        rows=_number,
        data={"prompt": "{text}", "label": "score"},
    ),
    _headed(
        "tags",
        "token_classification",
        "AutoModelForTokenClassification",
        rows=_tagged,
        data={"words": "words", "label": "tags"},
    ),
    _headed(
        "encoder-decoder",
        "seq2seq",
        "AutoModelForSeq2SeqLM",
        rows=_words,
        family="t5",
        sizes=T5,
        data=COMPLETION,
        tokenizer=_ended,
        theirs=_completion,
    ),
    _headed(
        "pictures",
        "image_classification",
        "AutoModelForImageClassification",
        rows=_picture,
        family="vit",
        sizes=VIT,
        tokenizer=None,
        data={"image": "image", "label": "label"},
    ),
)

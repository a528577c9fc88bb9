"""Tiny jobs of every task and method: each with accumulation, evaluations and ends of epochs within a second or two."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.trainer.support import diffusion, digits
from tests.trainer.support import tiny_models as heads
from trainer.contract.train import (
    FullConfig,
    LoraConfig,
    OptimConfig,
    OptimizerName,
    QloraConfig,
    SamplesConfig,
    TrainConfig,
)

STEPS = 14
GLOBAL_BATCH = 12
EVAL_EVERY = 4
ROWS = 40
TRAINED = 32
"""Rows that are not held out."""
POISONED = 5
"""Row whose number is too large to be squared; it is not held out."""
TEMPLATE = (
    "{% for m in messages %}{{ 'w1' if m.role == 'user' else 'w2' }} {{ m.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}w2 {% endif %}"
)
LORA, FULL = LoraConfig(r=4, dropout=0.2), FullConfig()
NF4, INT8 = (QloraConfig(r=4, dropout=0.2, bits=bits) for bits in (4, 8))
COMPLETION_COLUMNS = {"prompt": "{word} ", "completion": "{meaning}"}


def optim(name: OptimizerName = "adamw") -> OptimConfig:
    return OptimConfig(name=name, lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A task with a method, and the columns that it takes."""

    model: Callable[[Path], Path]
    columns: dict[str, str]
    more: dict[str, Any]
    format: Literal["csv", "jsonl", "tar"] = "csv"
    micros: int = 4
    """Micro-batches that every step has, at the least."""


KINDS: dict[str, Kind] = {
    "causal_lm lora": Kind(
        model=heads.llama, columns={"prompt": "{word} ", "completion": "{meaning}"}, more={"method": LORA}
    ),
    "causal_lm full": Kind(
        model=heads.llama, columns={"prompt": "{word} ", "completion": "{meaning}"}, more={"method": FULL}
    ),
    "causal_lm packed": Kind(
        model=heads.llama, columns={"completion": "{meaning}"}, micros=2,
        more={"method": FULL, "packing": True, "max_length": 16, "micro_batch": 2},
    ),
    "causal_lm chats": Kind(
        model=lambda folder: _chatty(heads.llama(folder)), columns={"messages": "chat"}, more={"method": LORA},
        format="jsonl",
    ),
    "text_classification lora": Kind(
        model=heads.bert, columns={"prompt": "{meaning}", "label": "kind"},
        more={"method": LORA, "task": "text_classification"},
    ),
    "text_regression full": Kind(  # whose loss overflows with one of the rows, and whose best weights are the result
        model=heads.roberta, columns={"prompt": "{meaning}", "label": "score"},
        more={"method": FULL, "task": "text_regression", "selection": {"metric": "mae", "best": True}},
    ),
    "token_classification lora": Kind(
        model=heads.bert, columns={"words": "words", "label": "tags"}, format="jsonl",
        more={"method": LORA, "task": "token_classification"},
    ),
    "seq2seq full": Kind(
        model=heads.t5, columns={"prompt": "{meaning}", "completion": "{word}"},
        more={"method": FULL, "task": "seq2seq"},
    ),
    "seq2seq lora": Kind(
        model=heads.bart, columns={"prompt": "{meaning}", "completion": "{word}"},
        more={"method": LORA, "task": "seq2seq"},
    ),
    "dpo lora": Kind(
        model=heads.llama, columns={"prompt": "{word} ", "chosen": "{meaning}", "rejected": "w5 w6"},
        more={"method": LORA, "task": "dpo"},
    ),
    "reward_model lora": Kind(
        model=heads.llama, columns={"prompt": "{word} ", "chosen": "{meaning}", "rejected": "w5 w6"},
        more={"method": LORA, "task": "reward_model"},
    ),
    "image_classification full": Kind(
        model=heads.vit, columns={"image": "image", "label": "label"}, format="tar",
        more={"method": FULL, "task": "image_classification", "samples": SamplesConfig()},
    ),
    "text_to_image lora": Kind(
        model=diffusion.stable_diffusion, columns={"image": "image", "prompt": "a {label}"}, format="tar",
        more={"method": LORA, "task": "text_to_image", "diffusion": {"sample_steps": 1}},
    ),
    "causal_lm qlora": Kind(model=heads.llama, columns=COMPLETION_COLUMNS, more={"method": NF4}),
    "causal_lm int8": Kind(model=heads.llama, columns=COMPLETION_COLUMNS, more={"method": INT8}),
    "text_classification qlora": Kind(
        model=heads.bert, columns={"prompt": "{meaning}", "label": "kind"},
        more={"method": NF4, "task": "text_classification"},
    ),
    "causal_lm dora": Kind(
        model=heads.llama, columns=COMPLETION_COLUMNS,
        more={"method": LoraConfig(r=4, dropout=0.2, dora=True, rslora=True, targets=("q_proj", "down_proj"))},
    ),
    "causal_lm adamw_8bit": Kind(
        model=heads.llama, columns=COMPLETION_COLUMNS, more={"method": FULL, "optim": optim("adamw_8bit")},
    ),
    "causal_lm adafactor": Kind(
        model=heads.llama, columns=COMPLETION_COLUMNS, more={"method": FULL, "optim": optim("adafactor")},
    ),
}  # fmt: skip


def train(kind: Kind, folder: Path) -> TrainConfig:
    """Return its configuration, with the model made in `folder`."""
    fields: dict[str, Any] = {
        "model": str(kind.model(folder)), "optim": optim(), "max_steps": STEPS,
        "data": {"path": f"rows.{kind.format}", "eval_share": 1 - TRAINED / ROWS, **kind.columns},
        "global_batch": GLOBAL_BATCH, "micro_batch": 3, "max_length": 32, "eval_every_steps": EVAL_EVERY,
        "samples": SamplesConfig(prompts=("w1 w2",), max_new_tokens=2),
    }  # fmt: skip
    return TrainConfig.model_validate(fields | kind.more)


def data(kind: Kind) -> bytes:
    """Return rows of uneven lengths, or pictures."""
    if kind.format == "tar":
        return digits.archive(ROWS)
    return "\n".join(_jsonl() if kind.format == "jsonl" else _csv()).encode()


def _meaning(row: int) -> list[str]:
    return [f"w{(row * 7 + j * j) % 90}" for j in range(1 + row % 9)]


def _csv() -> Iterator[str]:
    yield "word,meaning,kind,score"
    for i in range(ROWS):
        yield f"w{i},{' '.join(_meaning(i))},{'ab'[i % 2]},{1e30 if i == POISONED else (i % 5) / 5:.1f}"


def _jsonl() -> Iterator[str]:
    for i in range(ROWS):
        words = _meaning(i)
        turns = [("user", f"w{i}"), ("assistant", " ".join(words))]
        chat = [{"role": role, "content": content} for role, content in turns * (1 + i % 2)]
        tags = ["O" if int(word[1:]) > 40 else "B-NAME" for word in words]
        yield json.dumps({"chat": chat, "words": words, "tags": tags})


def _chatty(folder: Path) -> Path:
    tokenizer = heads.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder

"""The same rows, order and weights in TRL's trainers and in HF Trainer; records tokens, masks and losses."""

import copy
import importlib
import inspect
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import SequentialSampler

from benchmarks.parity import cases
from benchmarks.parity.cases import ParityCase
from benchmarks.parity.own import OwnRun, Row
from trainer.optim import learning_rates

IGNORED = -100


def record(trainer: Any) -> list[float]:
    """Let a trainer take the rows in their order; return the list that receives the loss of each micro-batch."""
    losses: list[float] = []
    step = trainer.training_step

    def training_step(*arguments: Any, **more: Any) -> Any:
        loss = step(*arguments, **more)
        losses.append(float(loss))
        return loss

    trainer.training_step = training_step
    trainer._get_train_sampler = lambda *_: SequentialSampler(trainer.train_dataset)
    return losses


class PeerRun:
    """Training by a peer, with a copy of this trainer's model."""

    def __init__(self, case: ParityCase, own: OwnRun, rows: Sequence[dict[str, Any]], folder: Path) -> None:
        """`rows`: in this trainer's columns, in the order in which they are trained."""
        built = own.setup
        self._accumulated = 1 if built.config.packing else -(-cases.BATCH // built.micro_rows)
        self._labels = getattr(getattr(built.task.data, "labels", None), "names", ())
        self._tokenizer = built.task.data.tokenizer
        self._case, model = case, copy.deepcopy(built.trained.bare)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=built.rate.lr, weight_decay=0.0, fused=True)
        share, total = built.config.optim.warmup_share, built.total_steps
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rates.learning_rate(1.0, share, step, total)
        )
        self.trainer = self._build(model, rows, folder, built.config, (optimizer, schedule))
        self._parts = record(self.trainer)

    def _build(self, model: Any, rows: Sequence[dict[str, Any]], folder: Path, config: Any, optimizers: Any) -> Any:
        import datasets

        name = self._case.peer
        made = _module(name)
        own = {"max_length": config.max_length} if made is not transformers else {"remove_unused_columns": False}
        settings = getattr(made, name.replace("Trainer", "Config") if made is not transformers else "TrainingArguments")
        arguments = settings(
            output_dir=str(folder), per_device_train_batch_size=cases.BATCH // self._accumulated,
            gradient_accumulation_steps=self._accumulated, max_steps=cases.STEPS, max_grad_norm=config.optim.clip_norm,
            gradient_checkpointing=False, bf16=False, use_cpu=True, seed=config.seed, save_strategy="no",
            logging_strategy="no", report_to="none", disable_tqdm=True, **own, **self._case.options,
        )  # fmt: skip
        converted = [self._case.theirs(row) for row in rows]
        is_plain = made is transformers
        data: Any = [self._encoded(row) for row in converted] if is_plain else datasets.Dataset.from_list(converted)
        more: dict[str, Any] = {"data_collator": self._collator()} if is_plain else {}
        return getattr(made, name)(
            model=model, args=arguments, train_dataset=data, processing_class=self._tokenizer, optimizers=optimizers,
            **more,
        )  # fmt: skip

    def _encoded(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row as the scripts among transformers' examples encode it."""
        tokenizer = self._tokenizer
        if "image" in row:
            pixels = tokenizer(cases.picture_of(row["image"]), return_tensors="pt")["pixel_values"][0]
            return {"pixel_values": pixels, "labels": self._labels.index(row["label"])}
        if "words" in row:
            encoded = tokenizer(row["words"], is_split_into_words=True)
            words = encoded.word_ids()
            labels = [
                IGNORED if word is None or word == before else self._labels.index(row["tags"][word])
                for word, before in zip(words, [None, *words], strict=False)
            ]
            return {"input_ids": encoded["input_ids"], "labels": labels}
        if "completion" in row:
            target = tokenizer(text_target=row["completion"])["input_ids"]
            return {"input_ids": tokenizer(row["prompt"])["input_ids"], "labels": target}
        label = self._labels.index(row["mood"]) if "mood" in row else float(row["score"])
        return {"input_ids": tokenizer(row["text"])["input_ids"], "labels": label}

    def _collator(self) -> Any:
        match self._case.train["task"]:
            case "image_classification":
                return transformers.DefaultDataCollator()
            case "token_classification":
                return transformers.DataCollatorForTokenClassification(self._tokenizer)
            case "seq2seq":
                return transformers.DataCollatorForSeq2Seq(self._tokenizer)
        return transformers.DataCollatorWithPadding(self._tokenizer)

    def rows(self) -> list[list[Row]]:
        """Return the sequences of each row that the peer trains."""
        is_pair = self._case.train.get("task") == "seq2seq"
        return [_sequences(row, is_pair=is_pair) for row in self.trainer.train_dataset]

    def losses(self) -> list[float]:
        """Train all steps and return their losses."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.trainer.train()
        parts, per_step = self._parts, self._accumulated
        return [sum(parts[n : n + per_step]) for n in range(0, len(parts), per_step)]


def _module(name: str) -> Any:
    """Return the module of a trainer's class."""
    import trl

    if name == "Trainer":
        return transformers
    return importlib.import_module("trl.experimental.orpo") if name == "ORPOTrainer" else trl


def _sequences(row: dict[str, Any], *, is_pair: bool) -> list[Row]:
    """Return tokens and loss mask of each sequence; the mask is empty if the loss is of the whole text."""
    if "chosen_labels" in row:
        return [
            (row[f"{name}_input_ids"], [label != IGNORED for label in row[f"{name}_labels"]])
            for name in ("chosen", "rejected")
        ]
    if "completion_ids" in row and "label" in row:
        prompt, ids = row["prompt_ids"], row["completion_ids"]
        return [(prompt + ids, [False] * len(prompt) + [True] * len(ids))]
    if "prompt_ids" in row:
        prompt, answers = row["prompt_ids"], (row["chosen_ids"], row["rejected_ids"])
        return [(prompt + ids, [False] * len(prompt) + [True] * len(ids)) for ids in answers]
    if "chosen_ids" in row:
        return [(row["chosen_ids"], []), (row["rejected_ids"], [])]
    labels, ids = row["labels"], list(row.get("input_ids", []))
    if is_pair:
        return [(ids, []), (labels, [True] * len(labels))]
    if not isinstance(labels, list):
        return [(ids, [])]
    return [(ids, [False, *(label != IGNORED for label in labels[1:])])]


def versions() -> dict[str, str]:
    """Return the versions of everything that is compared."""
    import accelerate
    import datasets
    import peft
    import trl

    return {made.__name__: made.__version__ for made in (torch, transformers, trl, peft, accelerate, datasets)}


def is_installed() -> bool:
    """Return True if TRL can run here."""
    try:
        import trl

        return inspect.isclass(trl.SFTTrainer)
    except (ImportError, RuntimeError):  # Its lazy modules hide the cause, a missing package.
        return False

"""Models and inputs of the tracer by task: the trainer's own tasks, and some that the tracer implements itself.

All rows of a task have the requested length; their content does not affect sizes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from trainer import tasks
from trainer.batching.examples import Example
from trainer.contract.data_config import DataConfig
from trainer.contract.train import TrainConfig
from trainer.memtrace.unet import NoiseData, NoiseModel
from trainer.tasks.common.task_data import Batch
from trainer.tasks.text.labelled_text import Labelled
from trainer.tasks.text.seq2seq import Pair, Seq2SeqData, Seq2SeqModel
from trainer.tasks.text.token_classification import Tagged

DEPTHS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "t5": (("num_layers",), ("num_decoder_layers",)),
    "bart": (("encoder_layers", "num_hidden_layers"), ("decoder_layers",)),
    "whisper": (("encoder_layers", "num_hidden_layers"), ("decoder_layers",)),
    "distilbert": (("n_layers",),),
}
"""Fields of the config with the depth of each of its stacks."""
DEPTH = (("num_hidden_layers", "n_layer"),)
KINDS = {
    **dict.fromkeys(("bert", "roberta", "distilbert"), "text_classification"),
    **dict.fromkeys(("t5", "bart"), "seq2seq"),
    "UNet2DConditionModel": "text_to_image",
    "vit": "image_classification",
    "whisper": "transcription",
}
"""Default task by family; other families are traced for `causal_lm`."""
HEADED = frozenset({"text_classification", "token_classification", "image_classification"})


def fresh_of(task: str, family: str) -> tuple[str, ...]:
    """Return the modules of a headed model whose weights no checkpoint provides."""
    if task not in HEADED:
        return ()
    if task == "text_classification" and family == "roberta":  # peft itself trains such a head whole
        return ("classifier.dense", "classifier.out_proj")
    more = ("pre_classifier",) if task == "text_classification" and family == "distilbert" else ()
    return (*more, "classifier", "score")  # the model has one of them


@dataclass(frozen=True, kw_only=True)
class TracedTask:
    """Data and model of a task that the tracer implements itself, as the training step uses them."""

    data: Any
    model: Any


class ImagesData:
    """Blank pictures with a class."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._shape = int(config.get("num_channels", 3)), *[int(config.get("image_size", 224))] * 2

    def collate(self, rows: Sequence[Any], device: torch.device) -> Batch:
        return {
            "pixel_values": torch.zeros((len(rows), *self._shape), device=device),
            "labels": torch.zeros(len(rows), dtype=torch.long, device=device),
        }

    def targets(self, row: Any) -> int:
        return 1

    def size(self, row: Any) -> int:
        return 1

    def begin_step(self, step: int) -> None:
        """Do nothing: a step has no random draws."""


class ImagesModel:
    """Image classification; the loss equals that of text classification."""

    architecture, peft_type = "AutoModelForImageClassification", None

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        logits = model(pixel_values=batch["pixel_values"]).logits.float()
        return functional.cross_entropy(logits, batch["labels"], reduction="sum")


class SpeechData(Seq2SeqData):
    """Half a minute of silence in each row, with its transcript."""

    def __init__(self, train: TrainConfig, config: Mapping[str, Any]) -> None:
        super().__init__(train)
        self._mel = int(config.get("num_mel_bins", 80)), 2 * int(config.get("max_source_positions", 1500))

    def collate(self, examples: Sequence[Pair], device: torch.device) -> Batch:
        return {
            **super().collate(examples, device),
            "input_features": torch.zeros((len(examples), *self._mel), device=device),
        }


class SpeechModel(Seq2SeqModel):
    """Transcription; the loss is that of `seq2seq`."""

    architecture = "AutoModelForSpeechSeq2Seq"
    peft_type: Any = None
    """None, because peft's own model classes accept only tokens as input."""

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        sound = batch["input_features"].to(next(model.parameters()).dtype)
        logits = model(input_features=sound, decoder_input_ids=batch["decoder_input_ids"], use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), reduction="sum")


@dataclass(frozen=True, kw_only=True)
class InputKind:
    """One task of the tracer. `data`: columns that make its training config valid."""

    data: Mapping[str, Any]
    row: Callable[[int, int], Any]
    """Make a row of (tokens to read, tokens to generate)."""

    def columns(self) -> DataConfig:
        return DataConfig(path="traced.jsonl", **self.data)


def _pair(length: int, target: int) -> Pair:
    return Pair(ids=[1] * length, labels=[1] * target, number=1)


def untie(model: Any, config: Mapping[str, Any]) -> None:
    """Untie the head of a T5 whose config says that it is separate from the word table.

    transformers ties such a model when it creates it; only a checkpoint with both matrices unties it.
    """
    if config.get("model_type") == "t5" and config.get("tie_word_embeddings") is False:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))


TEXT = {"prompt": "{text}", "label": "label"}
BY_TASK: Mapping[str, InputKind] = {
    "causal_lm": InputKind(data={"completion": "{text}"}, row=lambda n, _: Example(ids=[1] * n, prompt=0)),
    "text_classification": InputKind(data=TEXT, row=lambda n, _: Labelled(ids=[1] * n, label=0)),
    "token_classification": InputKind(
        data={"words": "words", "label": "label"}, row=lambda n, _: Tagged(ids=[1] * n, labels=[0] * n)
    ),
    "seq2seq": InputKind(data={"prompt": "{text}", "completion": "{text}"}, row=_pair),
    "image_classification": InputKind(data=TEXT, row=lambda n, _: n),
    "text_to_image": InputKind(data=TEXT, row=lambda n, _: n),
    "transcription": InputKind(data={"prompt": "{text}", "completion": "{text}"}, row=_pair),
}
TRAINED = {
    "image_classification": "text_classification",
    "text_to_image": "text_classification",
    "transcription": "seq2seq",
}
"""Task in the training configuration for each task that the tracer implements itself."""


def task_of(name: str, train: TrainConfig, config: Mapping[str, Any]) -> Any:
    """Return the task as the loop uses it, without a tokenizer."""
    if name == "image_classification":
        return TracedTask(data=ImagesData(config), model=ImagesModel())
    if name == "text_to_image":
        return TracedTask(data=NoiseData(config), model=NoiseModel())
    task: Any
    if name == "transcription":
        data = SpeechData(train, config)
        task = TracedTask(data=data, model=SpeechModel(train, data))
    else:
        task = tasks.build_task(train)
    if isinstance(task.data, Seq2SeqData):
        task.data.decoder_start = 0
    return task


def depths_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers of each stack. Raise ValueError if the config has none."""
    depths: list[int] = []
    for names in DEPTHS.get(str(config.get("model_type")), DEPTH):
        depth = next((config[n] for n in names if isinstance(config.get(n), int)), depths[0] if depths else 0)
        if depth < 1:
            raise ValueError(f"config has no positive {names[0]}")
        depths.append(depth)
    return tuple(depths)


def with_depths(config: Mapping[str, Any], depths: Sequence[int]) -> dict[str, Any]:
    """Return the config with the stacks cut to `depths` layers; lists with a value per layer are truncated."""
    fields, before = dict(config), depths_of(config)[0]
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == before:
            fields[name] = value[: depths[0]]
    for names, depth in zip(DEPTHS.get(str(config.get("model_type")), DEPTH), depths, strict=True):
        present = [n for n in names if n in fields] or [names[0]]
        fields.update(dict.fromkeys(present, depth))
    return fields

"""Loss and metrics on held-out rows, and the artifacts of a finished job."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from trainer.contract.train import TrainConfig
from trainer.tasks.common.task import Task


@torch.no_grad()
def heldout(
    task: Task[Any],
    model: Any,
    examples: Sequence[Any],
    *,
    size: int,
    device: torch.device,
    between: Callable[[], None],
) -> tuple[float, Mapping[str, float]]:
    """Return (mean loss, metrics of the task) over the held-out rows.

    `between` is called after every batch and may raise.
    """
    model.eval()
    task.model.choose_judged(examples)
    total, targets = 0.0, 0
    judged: list[Any] = []
    try:
        for batch in task.data.micro_batches(examples, size):
            loss, more = task.model.judge(model, task.data.collate(batch, device))
            total += float(loss)
            targets += sum(task.data.targets(e) for e in batch)
            judged.extend(more)
            between()
    finally:
        model.train()
    return total / targets, task.model.metrics(judged)


def as_trained(config: TrainConfig, accelerator: Accelerator) -> contextlib.AbstractContextManager[Any]:
    """Return the context for calls of a model that bypass accelerate's wrapper.

    It is autocast if the base is quantised, because the norms then have a wider type than the head.
    """
    return accelerator.autocast() if config.quantised else contextlib.nullcontext()


def without_adapter(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Context manager that turns the adapters of a LoRA off."""
    manager: contextlib.AbstractContextManager[Any] = model.disable_adapter()
    return manager


@contextlib.contextmanager
def watched(model: Any, between: Callable[[], None]) -> Iterator[None]:
    """Call `between` before each forward pass of a model within the block.

    A pass may be one new token. The model may be wrapped in adapters. `between` may raise.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    hooks = [module.register_forward_pre_hook(lambda *_: between()) for module in {model, inner}]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def write_artifacts(
    folder: Path,
    task: Task[Any],
    model: Any,
    state: dict[str, torch.Tensor] | None,
    samples: list[dict[str, str]],
    scores: dict[str, Any],
) -> None:
    """Write `adapter/` (peft's format) or `model/` (a whole folder), `samples.json` and `eval.json`.

    `state`: tensors that replace the model's own.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    task.model.save(folder, model, state)
    texts = task.samples.save_files(folder, samples)
    (folder / "samples.json").write_text(json.dumps(texts, indent=1, ensure_ascii=False))
    (folder / "eval.json").write_text(json.dumps(scores, indent=1))

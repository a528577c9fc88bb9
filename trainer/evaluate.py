"""What the model can do: its loss on held-out rows, texts it writes, and the artifacts of a finished job."""

import contextlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from trainer.contract.train import LoraConfig, TrainConfig
from trainer.dataset import IGNORED, Example, collate, micro_batches


def loss_sum(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Summed cross-entropy (nats) of the tokens that carry loss, float32."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    wanted = batch["labels"][:, 1:]
    carries = wanted != IGNORED
    return functional.cross_entropy(logits[:, :-1][carries].float(), wanted[carries], reduction="sum")


@torch.no_grad()
def heldout_loss(
    model: Any, examples: Sequence[Example], *, size: int, pad: int, device: torch.device, between: Callable[[], None]
) -> float:
    """Mean loss of a token over the held-out rows; `between` is called after every batch and may raise."""
    model.eval()
    total, tokens = 0.0, 0
    try:
        for batch in micro_batches(examples, size):
            total += float(loss_sum(model, collate(batch, pad, device)))
            tokens += sum(e.targets for e in batch)
            between()
    finally:
        model.train()
    return total / tokens


@torch.no_grad()
def write_samples(model: Any, tokenizer: Any, config: TrainConfig, device: torch.device) -> list[str]:
    """Greedy continuations of the configured prompts, all in one left-padded batch."""
    if not config.samples.prompts:
        return []
    model.eval()
    side, pad = tokenizer.padding_side, tokenizer.pad_token
    tokenizer.padding_side = "left"
    tokenizer.pad_token = pad or tokenizer.eos_token
    try:
        batch = tokenizer(list(config.samples.prompts), return_tensors="pt", padding=True).to(device)
        batch.pop("token_type_ids", None)
        out = model.generate(
            **batch,
            max_new_tokens=config.samples.max_new_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=tokenizer.pad_token_id,
        )
    finally:
        tokenizer.padding_side, tokenizer.pad_token = side, pad
        model.train()
    written = out[:, batch["input_ids"].shape[1] :]
    return [text.strip() for text in tokenizer.batch_decode(written, skip_special_tokens=True)]


def without_adapter(model: Any) -> contextlib.AbstractContextManager[Any]:
    """The base model inside a LoRA."""
    manager: contextlib.AbstractContextManager[Any] = model.disable_adapter()
    return manager


def write_artifacts(
    folder: Path, model: Any, tokenizer: Any, config: TrainConfig, samples: list[dict[str, str]], scores: dict[str, Any]
) -> None:
    """`adapter/` (peft's format) or `model/` (a whole folder), `samples.json`, `eval.json`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if isinstance(config.method, LoraConfig):
        _write_adapter(folder / "adapter", model)
    else:
        model.config.use_cache = True
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
    (folder / "samples.json").write_text(json.dumps(samples, indent=1, ensure_ascii=False))
    (folder / "eval.json").write_text(json.dumps(scores, indent=1))


def _write_adapter(folder: Path, model: Any) -> None:
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder.mkdir()
    adapter = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {n: t.detach().cpu().contiguous() for n, t in adapter.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = model.peft_config["default"]
    training, settings.inference_mode = settings.inference_mode, True
    try:
        settings.save_pretrained(folder)
    finally:
        settings.inference_mode = training

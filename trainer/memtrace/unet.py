"""Model, inputs and segments of the tracer for Stable Diffusion's UNet, trained as in diffusers' own examples.

Latents and the outputs of the text encoders are inputs. The model predicts the noise, and the loss is its mean square
error. The autoencoder and the text encoders are not part of the step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from trainer.contract.train import LoraConfig, TrainConfig
from trainer.memtrace.storage_tracker import Storages, in_backward
from trainer.tasks.common.task_data import Batch

TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
"""Modules that get LoRA adapters in diffusers' examples."""
WORDS = 77
"""Fixed sequence length of CLIP's text encoders, in tokens."""
LATENT_SCALE = 8
"""Ratio of an image's side to its latent's side, in pixels."""


class NoiseData:
    """Batches of zero latents, noise and text embeddings. A row is the side of its image in pixels."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._channels, self._words = int(config.get("in_channels", 4)), int(config["cross_attention_dim"])
        more = config.get("addition_embed_type") == "text_time"
        times = 6 * int(config.get("addition_time_embed_dim", 256))
        self._pooled = int(config["projection_class_embeddings_input_dim"]) - times if more else 0

    def collate(self, rows: Sequence[Any], device: torch.device) -> Batch:
        batch_size, side = len(rows), int(rows[0]) // LATENT_SCALE
        batch = {
            "latents": torch.zeros((batch_size, self._channels, side, side), device=device),
            "noise": torch.zeros((batch_size, self._channels, side, side), device=device),
            "steps": torch.zeros(batch_size, dtype=torch.long, device=device),
            "words": torch.zeros((batch_size, WORDS, self._words), device=device),
        }
        if self._pooled:
            batch |= {
                "text_embeds": torch.zeros((batch_size, self._pooled), device=device),
                "time_ids": torch.zeros((batch_size, 6), device=device),
            }
        return batch

    def targets(self, row: Any) -> int:
        return 1

    def size(self, row: Any) -> int:
        return 1

    def begin_step(self, step: int) -> None:
        """Do nothing: a step has no random draws."""


class NoiseModel:
    """Noise prediction. The loss is the sum of the squared errors of all values."""

    architecture, peft_type = "UNet2DConditionModel", None

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        dtype = next(model.parameters()).dtype
        more = {n: batch[n].to(dtype) for n in ("text_embeds", "time_ids") if n in batch}
        prediction = model(
            batch["latents"].to(dtype), batch["steps"], encoder_hidden_states=batch["words"].to(dtype),
            added_cond_kwargs=more or None,
        ).sample  # fmt: skip
        return functional.mse_loss(prediction.float(), batch["noise"], reduction="sum")


def built(config: Mapping[str, Any], train: TrainConfig, dtype: torch.dtype, targets: Sequence[str]) -> Any:
    """Return the UNet, with adapters for LoRA, on the default device. Raise ValueError if diffusers is missing."""
    try:
        from diffusers import UNet2DConditionModel
    except ImportError:
        raise ValueError("tracing a UNet needs diffusers, which is not installed: pip install diffusers") from None
    model = UNet2DConditionModel.from_config(dict(config)).to(dtype)
    if train.recomputes:
        model.enable_gradient_checkpointing()
    if isinstance(train.method, LoraConfig):
        import peft

        lora = peft.LoraConfig(
            r=train.method.r, lora_alpha=train.method.alpha, lora_dropout=train.method.dropout,
            target_modules=list(targets or TARGETS),
        )  # fmt: skip
        model = peft.get_peft_model(model, lora)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    return model


def mark(model: Any, storages: Storages) -> None:
    """Add hooks that start a named segment of `storages` when a block begins or ends, forward and backward."""
    unet = getattr(model, "base_model", model)
    unet = getattr(unet, "model", unet)
    blocks = [(f"down {i}", b) for i, b in enumerate(unet.down_blocks)]
    blocks += [("middle", unet.mid_block), *((f"up {i}", b) for i, b in enumerate(unet.up_blocks))]

    def entered(name: str) -> None:
        if not in_backward():
            storages.enter(f"forward {name}", "activations")

    def left(name: str, output: Any) -> None:
        if in_backward():
            return
        out = output[0] if isinstance(output, tuple) else output
        if out.requires_grad:
            out.register_hook(lambda _: storages.enter(f"backward {name}", "temporary"))
        if name == blocks[-1][0]:
            storages.enter("forward head", "logits")

    for name, block in blocks:
        block.register_forward_pre_hook(lambda _, __, name=name: entered(name))
        block.register_forward_hook(lambda _, __, output, name=name: left(name, output))

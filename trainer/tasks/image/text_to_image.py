"""Text-to-image fine-tunes of the UNet of Stable Diffusion 1.x, 2.x or SDXL, in full or by adapters.

VAE and text encoders are frozen (Rombach et al. 2022, arXiv 2112.10752; Podell et al. 2023, arXiv 2307.01952).
"""

import base64
import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from trainer.batching import sampler as order
from trainer.dataset.archives import Picture
from trainer.dataset.prompts import fill_prompt
from trainer.models import adapters as model_adapters
from trainer.tasks.common import image_loading as pictures
from trainer.tasks.common.base import Batch, Row, Task
from trainer.tasks.common.image_loading import Array
from trainer.tasks.image import diffusers_io
from trainer.tasks.image.frozen_encoders import Encoded, Frozen, Ids, min_snr_weights, stacked

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Picture and its text."""

    number: int
    """Row number, from 1."""
    row: Row
    ids: Ids
    length: int
    """Number of tokens of the text before it is cut."""
    sizes: tuple[int, ...]
    """SDXL's size inputs in pixels: original height and width, top and left of the crop, target height and width."""


class TextToImage(Task[Drawn]):
    """Task with the mean squared error of the noise, or of the velocity if the scheduler predicts it, as loss.

    Random values for a row depend on (seed, step, row) alone.
    """

    architecture = "UNet2DConditionModel"
    adapters = None
    cuts = False
    keeps_base_samples = False

    def _prepare(self) -> None:
        """Read configurations and tokenizers, but no weights."""
        self._kind = diffusers_io.kind_of(self.config)
        self.tokenizer, *more = self._kind.tokenizers
        self._tokenizers = [self.tokenizer, *more]
        self._encoded: dict[int, Encoded] = {}
        self._frozen: Frozen | None = None
        self._step = 0

    @property
    def limit(self) -> int:
        return min(self.config.max_length, int(self.tokenizer.model_max_length))

    def example(self, row: Row, number: int) -> Drawn:
        data = self.config.data
        text = fill_prompt(data, row, number)
        _, sizes = self._sized(row, number)
        return Drawn(
            number=number, row={data.image: row[data.image]}, ids=self._ids(text), sizes=sizes,
            length=len(self.tokenizer(text)["input_ids"]),
        )  # fmt: skip

    def _ids(self, text: str) -> Ids:
        made = (t(text, truncation=True, max_length=self.limit, padding="max_length") for t in self._tokenizers)
        return tuple(tuple(one["input_ids"]) for one in made)

    def _sized(self, row: Row, number: int) -> tuple[Array, tuple[int, ...]]:
        """Return the picture scaled by its shorter side and cropped to the centre, and SDXL's sizes."""
        picture = pictures.taken(row, self.config.data.image, self.where, number)
        side, width, height = self._kind.resolution, picture.width, picture.height
        scale = side / min(width, height)
        resized = picture.resize(
            (max(side, round(width * scale)), max(side, round(height * scale))), Image.Resampling.LANCZOS
        )
        top, left = (resized.height - side) // 2, (resized.width - side) // 2
        cut = resized.crop((left, top, left + side, top + side))
        return np.asarray(cut), (height, width, top, left, side, side)

    def lengths(self, example: Drawn) -> tuple[int, ...]:
        return (example.length,)

    def sequences(self, example: Drawn) -> tuple[Sequence[int], ...]:
        return ()

    def shown(self, example: Drawn) -> tuple[str, str]:
        cell = example.row[self.config.data.image]
        name = cell.name if isinstance(cell, Picture) else f"row {example.number}"
        height, width, _, _, side, _ = example.sizes
        return self.tokenizer.decode(example.ids[0]), f"{name}: {width} x {height} pixels, as {side} x {side}"

    def size(self, example: Drawn) -> int:
        return 1

    def targets(self, example: Drawn) -> int:
        return 1

    def begins(self, step: int) -> None:
        self._step = step

    # ----------------------------------------------------------------------------------------------------------- model

    def model(self, precision: str, *, hollow: bool = False) -> Any:
        self._precision = PRECISIONS[precision]
        lora = self.config.adapters is not None
        unet = diffusers_io.unet(self.config, self._precision if lora else torch.float32, hollow=hollow)
        if self.config.recomputes:
            unet.enable_gradient_checkpointing()
        plain = self.config.model_copy(update={"gradient_checkpointing": False})
        return model_adapters.wrap(unet, plain, targets=diffusers_io.targets(unet, self.config), adapters=self.adapters)

    def hollow(self) -> Any:
        return diffusers_io.unet(self.config, torch.float32, hollow=True)

    def check_targets(self, model: Any) -> None:
        if not diffusers_io.targets(model, self.config):  # they are named
            super().check_targets(model)

    def _parts(self, device: torch.device) -> Frozen:
        if self._frozen is None:
            with diffusers_io.refusals(self.config):
                self._frozen = Frozen(self.config.model, device, self._precision, two=self._kind.two)
        return self._frozen

    def _made(self, example: Drawn, device: torch.device) -> Encoded:
        found = self._encoded.get(example.number)
        if found is None:
            pixels, _ = self._sized(example.row, example.number)
            found = self._parts(device).encoded(pixels, example.ids)
            if self.config.diffusion.cache:
                self._encoded[example.number] = found
        return found

    def collate(self, examples: Sequence[Drawn], device: torch.device) -> Batch:
        """Return noised latents, the prediction target and the UNet's conditions.

        Random values are drawn on the host, so they are the same on every device.
        """
        made = [self._made(e, device) for e in examples]
        drawn = [self._draw(e, one) for e, one in zip(examples, made, strict=True)]
        latents, noise, steps = (stacked(column, device) for column in zip(*drawn, strict=True))
        scheduler = self._kind.scheduler
        velocity = scheduler.config.prediction_type == "v_prediction"
        batch = {
            "noised": scheduler.add_noise(latents, noise, steps),
            "steps": steps,
            "wanted": scheduler.get_velocity(latents, noise, steps) if velocity else noise,
            "text": stacked([one.text for one in made], device),
        }
        if self._kind.two:
            batch["pooled"] = stacked([one.pooled for one in made if one.pooled is not None], device)
            batch["sizes"] = torch.tensor([e.sizes for e in examples], dtype=batch["text"].dtype).to(device)
        return batch

    def _draw(self, example: Drawn, made: Encoded) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return latents, noise and timestep."""
        generator = torch.Generator().manual_seed(order.row_seed(self.config.seed, self._step, example.number))
        step = torch.randint(self._kind.scheduler.config.num_train_timesteps, (), generator=generator)
        latents = made.mean + made.deviation * torch.randn(made.mean.shape, generator=generator)
        return latents * self._kind.scaling, torch.randn(made.mean.shape, generator=generator), step

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        more = {}
        if self._kind.two:
            more["added_cond_kwargs"] = {"text_embeds": batch["pooled"], "time_ids": batch["sizes"]}
        said = model(batch["noised"], batch["steps"], encoder_hidden_states=batch["text"], **more).sample
        each: torch.Tensor = (said.float() - batch["wanted"].float()).square().mean(dim=(1, 2, 3))
        if self.config.diffusion.min_snr is not None:
            each = each * min_snr_weights(self._kind.scheduler, batch["steps"], self.config.diffusion.min_snr)
        return each.sum()

    # --------------------------------------------------------------------------------------------------------- results

    @torch.no_grad()
    def write(self, model: Any, device: torch.device) -> list[str]:
        """Return one PNG file per prompt, in base64."""
        model.eval()
        try:
            pipeline = diffusers_io.pipeline(self.config, self._kind, self._parts(device), _bare(model))
            return [self._picture(pipeline, prompt, device) for prompt in self.config.samples.prompts]
        finally:
            model.train()

    def _picture(self, pipeline: Any, prompt: str, device: torch.device) -> str:
        half = self._precision is not torch.float32
        with torch.autocast(device.type, self._precision) if half else contextlib.nullcontext():
            latents = pipeline(
                prompt, generator=torch.Generator().manual_seed(self.config.seed), output_type="latent",
                height=self._kind.resolution, width=self._kind.resolution,
                num_inference_steps=self.config.diffusion.sample_steps,
            ).images  # fmt: skip
        decoded = pipeline.vae.decode(latents.float() / self._kind.scaling).sample
        buffer = io.BytesIO()
        pipeline.image_processor.postprocess(decoded)[0].save(buffer, "PNG")
        return base64.b64encode(buffer.getvalue()).decode()

    def keep(self, folder: Path, samples: list[dict[str, str]]) -> list[dict[str, str]]:
        documents = []
        for number, sample in enumerate(samples):
            names = {which: f"samples/{number:02d}-{which}.png" for which in ("base", "tuned") if sample[which]}
            for which, name in names.items():
                (folder / "samples").mkdir(exist_ok=True)
                (folder / name).write_bytes(base64.b64decode(sample[which]))
            documents.append({**sample, **names})
        return documents

    def save(self, folder: Path, model: Any, state: dict[str, torch.Tensor] | None = None) -> None:
        """Write `adapter/` for a pipeline's `load_lora_weights`, or `model/` with a whole pipeline."""
        if self.config.adapters is not None:
            diffusers_io.save_lora(folder / "adapter", self._kind, model, state)
            return
        unet = diffusers_io.unet_of(model, state)
        parts = self._parts(next(model.parameters()).device)
        diffusers_io.pipeline(self.config, self._kind, parts, unet).save_pretrained(folder / "model")

    def merge(self, folder: Path) -> None:
        """Write `model/`, a whole pipeline with the merged UNet in float32, as after a full fine-tune."""
        cpu = torch.device("cpu")
        unet = diffusers_io.unet(self.config, torch.float32, hollow=False)
        made = diffusers_io.pipeline(self.config, self._kind, self._parts(cpu), unet)
        made.load_lora_weights(folder / "adapter")
        made.fuse_lora(components=["unet"])
        made.unload_lora_weights()
        made.save_pretrained(folder / "model")


def _bare(model: Any) -> Any:
    """Return the UNet without peft's wrapper; adapters stay inside it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model

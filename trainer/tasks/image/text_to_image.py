"""Text-to-image fine-tunes of the UNet of Stable Diffusion 1.x, 2.x or SDXL, in full or by adapters.

VAE and text encoders are frozen (Rombach et al. 2022, arXiv 2112.10752; Podell et al. 2023, arXiv 2307.01952).
"""

import base64
import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from trainer.batching import sampler
from trainer.contract.train import TrainConfig
from trainer.dataset.archives import Picture
from trainer.dataset.prompts import fill_prompt
from trainer.models import adapters
from trainer.tasks.common import image_loading
from trainer.tasks.common.example_reader import Row
from trainer.tasks.common.image_loading import Array
from trainer.tasks.common.task import Task
from trainer.tasks.common.task_data import Batch, TaskData
from trainer.tasks.common.task_model import TaskModel
from trainer.tasks.common.task_samples import TaskSamples, evaluation_mode
from trainer.tasks.image import diffusers_io
from trainer.tasks.image.diffusers_io import StableDiffusion
from trainer.tasks.image.frozen_encoders import Encoded, Ids, min_snr_weights, stacked

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionedImage:
    """Picture and its text."""

    number: int
    """Row number, from 1."""
    row: Row
    ids: Ids
    length: int
    """Number of tokens of the text before it is cut."""
    sizes: tuple[int, ...]
    """SDXL's size inputs in pixels: original height and width, top and left of the crop, target height and width."""


class TextToImageData(TaskData[CaptionedImage]):
    """Noised latents and captions of pictures. Random values of a row depend only on (seed, step, row)."""

    truncates = False

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.diffusion = StableDiffusion(config)
        """Frozen parts of the pipeline, which `TextToImageModel` and `TextToImageSamples` share."""

    def _prepare(self) -> None:
        """Read configurations and tokenizers, but no weights."""
        self._tokenizers = self.diffusion.kind.tokenizers
        self.tokenizer = self._tokenizers[0]
        self._encoded: dict[int, Encoded] = {}
        self._step = 0

    @property
    def limit(self) -> int:
        return min(self.config.max_length, int(self.tokenizer.model_max_length))

    def parse_row(self, row: Row, number: int) -> CaptionedImage:
        data = self.config.data
        text = fill_prompt(data, row, number)
        _, sizes = self._cropped(row, number)
        return CaptionedImage(
            number=number, row={data.image: row[data.image]}, ids=self._ids(text), sizes=sizes,
            length=len(self.tokenizer(text)["input_ids"]),
        )  # fmt: skip

    def _ids(self, text: str) -> Ids:
        encodings = (t(text, truncation=True, max_length=self.limit, padding="max_length") for t in self._tokenizers)
        return tuple(tuple(encoding["input_ids"]) for encoding in encodings)

    def _cropped(self, row: Row, number: int) -> tuple[Array, tuple[int, ...]]:
        """Return the picture scaled by its shorter side and cropped to the centre, and SDXL's sizes."""
        picture = image_loading.image_of(row, self.config.data.image, self.where, number)
        side, width, height = self.diffusion.kind.resolution, picture.width, picture.height
        scale = side / min(width, height)
        resized = picture.resize(
            (max(side, round(width * scale)), max(side, round(height * scale))), Image.Resampling.LANCZOS
        )
        top, left = (resized.height - side) // 2, (resized.width - side) // 2
        crop = resized.crop((left, top, left + side, top + side))
        return np.asarray(crop), (height, width, top, left, side, side)

    def lengths(self, parsed: CaptionedImage) -> tuple[int, ...]:
        return (parsed.length,)

    def sequences(self, parsed: CaptionedImage) -> tuple[Sequence[int], ...]:
        return ()

    def size(self, example: CaptionedImage) -> int:
        return 1

    def targets(self, example: CaptionedImage) -> int:
        return 1

    def begin_step(self, step: int) -> None:
        self._step = step

    def collate(self, examples: Sequence[CaptionedImage], device: torch.device) -> Batch:
        """Return `noised` latents, `steps` (rows), the prediction target `wanted`, and the UNet's conditions.

        `noised` and `wanted` are rows x channels x height x width; `text` is rows x tokens x width. SDXL also has
        `pooled` (rows x width) and `sizes` (rows x 6). Random values are drawn on the host, so they are the same on
        every device.
        """
        encoded = [self._encode(e, device) for e in examples]
        draws = [self._draw(e, latents) for e, latents in zip(examples, encoded, strict=True)]
        latents, noise, steps = (stacked(column, device) for column in zip(*draws, strict=True))
        scheduler = self.diffusion.kind.scheduler
        velocity = scheduler.config.prediction_type == "v_prediction"
        batch = {
            "noised": scheduler.add_noise(latents, noise, steps),
            "steps": steps,
            "wanted": scheduler.get_velocity(latents, noise, steps) if velocity else noise,
            "text": stacked([row.text for row in encoded], device),
        }
        if self.diffusion.kind.two_text_encoders:
            batch["pooled"] = stacked([row.pooled for row in encoded if row.pooled is not None], device)
            batch["sizes"] = torch.tensor([e.sizes for e in examples], dtype=batch["text"].dtype).to(device)
        return batch

    def _encode(self, example: CaptionedImage, device: torch.device) -> Encoded:
        """Return the encoded picture and text, from memory if `diffusion.cache` is set."""
        encoded = self._encoded.get(example.number)
        if encoded is None:
            pixels, _ = self._cropped(example.row, example.number)
            encoded = self.diffusion.encoders(device).encode(pixels, example.ids)
            if self.config.diffusion.cache:
                self._encoded[example.number] = encoded
        return encoded

    def _draw(self, example: CaptionedImage, encoded: Encoded) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return latents, noise and timestep."""
        generator = torch.Generator().manual_seed(sampler.row_seed(self.config.seed, self._step, example.number))
        step = torch.randint(self.diffusion.kind.scheduler.config.num_train_timesteps, (), generator=generator)
        latents = encoded.mean + encoded.deviation * torch.randn(encoded.mean.shape, generator=generator)
        return latents * self.diffusion.kind.scaling, torch.randn(encoded.mean.shape, generator=generator), step


class TextToImageModel(TaskModel[TextToImageData]):
    """UNet. The loss of a row is the mean squared error of the noise, or of the velocity if that is predicted."""

    architecture = "UNet2DConditionModel"
    peft_type = None
    needs_weights = True

    def check_kind(self) -> None:
        """Raise UserFault for a pipeline that is not a Stable Diffusion for text to image. Reads no weights."""
        _ = self._data.diffusion.kind

    def build(self, precision: str, *, hollow: bool = False) -> Any:
        diffusion = self._data.diffusion
        diffusion.precision = PRECISIONS[precision]
        dtype = diffusion.precision if self.config.adapters is not None else torch.float32
        unet = diffusers_io.load_unet(self.config, dtype, hollow=hollow)
        if self.config.recomputes:
            unet.enable_gradient_checkpointing()
        plain = self.config.model_copy(update={"gradient_checkpointing": False})
        return adapters.wrap(unet, plain, self.peft_type, targets=diffusers_io.adapter_targets(unet, self.config))

    def build_hollow(self) -> Any:
        return diffusers_io.load_unet(self.config, torch.float32, hollow=True)

    def check_targets(self, model: Any) -> None:
        if not diffusers_io.adapter_targets(model, self.config):  # The configuration names the modules.
            super().check_targets(model)

    def loss_sum(self, model: Any, batch: Batch) -> torch.Tensor:
        conditions = {}
        if self._data.diffusion.kind.two_text_encoders:
            conditions["added_cond_kwargs"] = {"text_embeds": batch["pooled"], "time_ids": batch["sizes"]}
        prediction = model(batch["noised"], batch["steps"], encoder_hidden_states=batch["text"], **conditions).sample
        losses: torch.Tensor = (prediction.float() - batch["wanted"].float()).square().mean(dim=(1, 2, 3))
        if self.config.diffusion.min_snr is not None:
            scheduler = self._data.diffusion.kind.scheduler
            losses = losses * min_snr_weights(scheduler, batch["steps"], self.config.diffusion.min_snr)
        return losses.sum()

    def save(self, folder: Path, model: Any, state: dict[str, torch.Tensor] | None = None) -> None:
        """Write `adapter/` for a pipeline's `load_lora_weights`, or `model/` with a whole pipeline."""
        diffusion = self._data.diffusion
        if self.config.adapters is not None:
            diffusers_io.save_lora(folder / "adapter", diffusion.kind, model, state)
            return
        unet = diffusers_io.unet_with_weights(model, state)
        diffusion.pipeline(unet, next(model.parameters()).device).save_pretrained(folder / "model")

    def merge(self, folder: Path, rows: Sequence[Any] = ()) -> Mapping[str, float]:
        """Write `model/`, a whole pipeline with the merged UNet in float32, as after a full fine-tune."""
        unet = diffusers_io.load_unet(self.config, torch.float32, hollow=False)
        pipeline = self._data.diffusion.pipeline(unet, torch.device("cpu"))
        pipeline.load_lora_weights(folder / "adapter")
        pipeline.fuse_lora(components=["unet"])
        pipeline.unload_lora_weights()
        pipeline.save_pretrained(folder / "model")
        return {}


class TextToImageSamples(TaskSamples[TextToImageData]):
    """One picture per prompt, as a PNG file in base64."""

    keeps_base_samples = False

    def describe(self, parsed: CaptionedImage) -> tuple[str, str]:
        cell = parsed.row[self.config.data.image]
        name = cell.name if isinstance(cell, Picture) else f"row {parsed.number}"
        height, width, _, _, side, _ = parsed.sizes
        text = self._data.tokenizer.decode(parsed.ids[0])
        return text, f"{name}: {width} x {height} pixels, as {side} x {side}"

    def write(self, model: Any, device: torch.device) -> list[str]:
        with evaluation_mode(model):
            # peft's wrapper is left out; the adapters are inside the UNet.
            unet = model.get_base_model() if hasattr(model, "get_base_model") else model
            pipeline = self._data.diffusion.pipeline(unet, device)
            return [self._picture(pipeline, prompt, device) for prompt in self.config.samples.prompts]

    def _picture(self, pipeline: Any, prompt: str, device: torch.device) -> str:
        diffusion = self._data.diffusion
        half = diffusion.precision is not torch.float32
        with torch.autocast(device.type, diffusion.precision) if half else contextlib.nullcontext():
            latents = pipeline(
                prompt, generator=torch.Generator().manual_seed(self.config.seed), output_type="latent",
                height=diffusion.kind.resolution, width=diffusion.kind.resolution,
                num_inference_steps=self.config.diffusion.sample_steps,
            ).images  # fmt: skip
        decoded = pipeline.vae.decode(latents.float() / diffusion.kind.scaling).sample
        buffer = io.BytesIO()
        pipeline.image_processor.postprocess(decoded)[0].save(buffer, "PNG")
        return base64.b64encode(buffer.getvalue()).decode()

    def save_files(self, folder: Path, samples: list[dict[str, str]]) -> list[dict[str, str]]:
        """Write the pictures to `samples/`, and return the samples with their file names."""
        documents = []
        for number, sample in enumerate(samples):
            names = {which: f"samples/{number:02d}-{which}.png" for which in ("base", "tuned") if sample[which]}
            for which, name in names.items():
                (folder / "samples").mkdir(exist_ok=True)
                (folder / name).write_bytes(base64.b64decode(sample[which]))
            documents.append({**sample, **names})
        return documents


class TextToImage(Task[CaptionedImage]):
    """Task that generates pictures from texts."""

    data: TextToImageData

    def __init__(self, config: TrainConfig) -> None:
        data = TextToImageData(config)
        super().__init__(data, TextToImageModel(config, data), TextToImageSamples(config, data))

"""The frozen parts of a latent diffusion model: what they make of a picture and of a text.

Each row goes through them alone, never beside others, so what they make of it is the same in whichever batch, process
or attempt it is made, and may as well be kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer.tasks.common.image_loading import Array

Ids = tuple[tuple[int, ...], ...]
"""Tokens of a text, one sequence for each text encoder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A row on the host, of one picture and one text."""

    mean: torch.Tensor
    """Channels x height x width, of the distribution that latents are drawn from; float32."""
    deviation: torch.Tensor
    text: torch.Tensor
    """Tokens x width."""
    pooled: torch.Tensor | None
    """Width; of SDXL."""


class Frozen:
    """On one device."""

    def __init__(self, model: str, device: torch.device, precision: torch.dtype, *, two: bool) -> None:
        """`two` text encoders, as SDXL has. The VAE computes in float32: in fp16 that of SDXL overflows. Raises
        OSError, ValueError.
        """
        from diffusers import AutoencoderKL
        from transformers import CLIPTextModel, CLIPTextModelWithProjection

        options: dict[str, Any] = {"use_safetensors": True}
        self.vae = AutoencoderKL.from_pretrained(model, subfolder="vae", torch_dtype=torch.float32, **options)
        options["dtype"] = precision
        self.texts: list[Any] = [CLIPTextModel.from_pretrained(model, subfolder="text_encoder", **options)]
        if two:
            second = CLIPTextModelWithProjection.from_pretrained(model, subfolder="text_encoder_2", **options)
            self.texts.append(second)
        for part in (self.vae, *self.texts):
            part.requires_grad_(False).eval().to(device)
        self.device = device

    @torch.no_grad()
    def encoded(self, pixels: Array, ids: Ids) -> Encoded:
        """`pixels`: height x width x 3."""
        picture = torch.from_numpy(pixels.astype(np.float32) / 127.5 - 1).permute(2, 0, 1)[None].to(self.device)
        found = self.vae.encode(picture).latent_dist
        text, pooled = self._text(ids)
        return Encoded(
            mean=found.mean[0].cpu(),
            deviation=found.std[0].cpu(),
            text=text[0].cpu(),
            pooled=None if pooled is None else pooled[0].cpu(),
        )

    def _text(self, ids: Ids) -> tuple[torch.Tensor, torch.Tensor | None]:
        """SDXL reads the last layer but one of both, and what the second one pools."""
        if len(self.texts) == 1:
            only: torch.Tensor = self.texts[0](torch.tensor([ids[0]], device=self.device))[0]
            return only, None
        made = [
            encoder(torch.tensor([tokens], device=self.device), output_hidden_states=True)
            for encoder, tokens in zip(self.texts, ids, strict=True)
        ]
        return torch.cat([one.hidden_states[-2] for one in made], dim=-1), made[1].text_embeds


def min_snr_weights(scheduler: Any, steps: torch.Tensor, gamma: float) -> torch.Tensor:
    """Of each row's loss, equation 6 of Hang et al. 2023; float32. With v-prediction it is divided by SNR + 1."""
    kept = scheduler.alphas_cumprod.to(steps.device)[steps].float()
    snr = kept / (1 - kept)
    velocity = scheduler.config.prediction_type == "v_prediction"
    weights: torch.Tensor = snr.clamp(max=gamma) / (snr + 1 if velocity else snr)
    return weights


def stacked(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """One batch on the device."""
    return torch.stack(list(tensors)).to(device)

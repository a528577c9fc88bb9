"""Frozen VAE and text encoders of a latent diffusion model.

Each row is encoded alone, so the result does not depend on batch, process or attempt and can be cached.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer.tasks.common.image_loading import Array

Ids = tuple[tuple[int, ...], ...]
"""Token ids of a text, one sequence for each text encoder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Encoded picture and text of a row, in host memory."""

    mean: torch.Tensor
    """Mean of the latents' distribution: channels x height x width, float32."""
    deviation: torch.Tensor
    text: torch.Tensor
    """Text embeddings: tokens x width."""
    pooled: torch.Tensor | None
    """Pooled text embedding (width) of SDXL; None for other models."""


class FrozenEncoders:
    """Frozen encoders on one device."""

    def __init__(self, model: str, device: torch.device, precision: torch.dtype, *, two_text_encoders: bool) -> None:
        """Load the encoders. `two_text_encoders`: True for SDXL. Raises OSError, ValueError.

        The VAE computes in float32, because SDXL's VAE overflows in fp16.
        """
        from diffusers import AutoencoderKL
        from transformers import CLIPTextModel, CLIPTextModelWithProjection

        options: dict[str, Any] = {"use_safetensors": True}
        self.vae = AutoencoderKL.from_pretrained(model, subfolder="vae", torch_dtype=torch.float32, **options)
        options["dtype"] = precision
        self.text_encoders: list[Any] = [CLIPTextModel.from_pretrained(model, subfolder="text_encoder", **options)]
        if two_text_encoders:
            second = CLIPTextModelWithProjection.from_pretrained(model, subfolder="text_encoder_2", **options)
            self.text_encoders.append(second)
        for part in (self.vae, *self.text_encoders):
            part.requires_grad_(False).eval().to(device)
        self.device = device

    @torch.no_grad()
    def encode(self, pixels: Array, ids: Ids) -> Encoded:
        """Return the encoded row. `pixels`: height x width x 3."""
        picture = torch.from_numpy(pixels.astype(np.float32) / 127.5 - 1).permute(2, 0, 1)[None].to(self.device)
        latents = self.vae.encode(picture).latent_dist
        text, pooled = self._text(ids)
        return Encoded(
            mean=latents.mean[0].cpu(),
            deviation=latents.std[0].cpu(),
            text=text[0].cpu(),
            pooled=None if pooled is None else pooled[0].cpu(),
        )

    def _text(self, ids: Ids) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return text embeddings and pooled embedding.

        SDXL uses the second-to-last layer of both encoders and the pooled output of the second one.
        """
        if len(self.text_encoders) == 1:
            embeddings: torch.Tensor = self.text_encoders[0](torch.tensor([ids[0]], device=self.device))[0]
            return embeddings, None
        outputs = [
            encoder(torch.tensor([tokens], device=self.device), output_hidden_states=True)
            for encoder, tokens in zip(self.text_encoders, ids, strict=True)
        ]
        return torch.cat([output.hidden_states[-2] for output in outputs], dim=-1), outputs[1].text_embeds


def min_snr_weights(scheduler: Any, steps: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return the weight of each row's loss (Hang et al. 2023, equation 6), float32.

    With v-prediction the weight is divided by SNR + 1.
    """
    signal_share = scheduler.alphas_cumprod.to(steps.device)[steps].float()
    snr = signal_share / (1 - signal_share)
    velocity = scheduler.config.prediction_type == "v_prediction"
    weights: torch.Tensor = snr.clamp(max=gamma) / (snr + 1 if velocity else snr)
    return weights


def stacked(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the tensors of equal shape as one batch on the device; the first dimension is the rows."""
    return torch.stack(list(tensors)).to(device)

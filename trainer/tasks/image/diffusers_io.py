"""Stable Diffusion pipelines in diffusers' format: loading, assembling and saving."""

import contextlib
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.contract.train import TrainConfig
from trainer.core.errors import UserFault
from trainer.models import availability
from trainer.tasks.image.frozen_encoders import FrozenEncoders

PIPELINES = {"StableDiffusionPipeline": False, "StableDiffusionXLPipeline": True}
"""Supported pipeline classes; True if the class has two text encoders."""
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
PREFIX = "base_model.model."


@dataclass(frozen=True, kw_only=True)
class PipelineKind:
    """Facts about a pipeline from its configuration files, without weights."""

    pipeline: str
    """Class name in diffusers."""
    two_text_encoders: bool
    """True if the pipeline has two text encoders."""
    tokenizers: tuple[Any, ...]
    scheduler: Any
    """Scheduler of the training: DDPM with the model's noise schedule."""
    resolution: int
    """Width and height of a picture in pixels."""
    scaling: float
    """Scaling factor of latents."""


@contextlib.contextmanager
def refusals(config: TrainConfig) -> Iterator[None]:
    """Convert the libraries' errors for an unreadable model to a UserFault, or a Fault if machine or Hub failed."""
    try:
        yield
    except (OSError, ValueError, KeyError) as e:
        if (fault := availability.read_fault(config, e)) is not None:
            raise fault from None
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise UserFault(
            f"train.model: cannot load {config.model!r} ({reason}); give the Hub id of a Stable Diffusion or SDXL "
            "model in diffusers' format that this machine may read, or its folder"
        ) from None


def pipeline_kind(config: TrainConfig) -> PipelineKind:
    """Return the kind of a pipeline. Raises UserFault if the pipeline is unsupported or not for text to image."""
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from transformers import AutoTokenizer

    with refusals(config):
        name = json.loads(_index(config.model).read_text()).get("_class_name")
        if name not in PIPELINES:
            raise ValueError(f"model_index.json says {name}")
        two_text_encoders = PIPELINES[name]
        unet = UNet2DConditionModel.load_config(config.model, subfolder="unet")
        vae = AutoencoderKL.load_config(config.model, subfolder="vae")
        scheduler = DDPMScheduler.from_pretrained(config.model, subfolder="scheduler")
        folders = ("tokenizer", "tokenizer_2") if two_text_encoders else ("tokenizer",)
        plain = {"trust_remote_code": False}
        tokenizers = tuple(AutoTokenizer.from_pretrained(config.model, subfolder=folder, **plain) for folder in folders)
        if unet["in_channels"] != vae.get("latent_channels", 4):
            raise ValueError(f"its UNet takes {unet['in_channels']} channels, as for inpainting")
        if scheduler.config.prediction_type not in ("epsilon", "v_prediction"):
            raise ValueError(f"its scheduler predicts {scheduler.config.prediction_type}")
    step = 2 ** (len(vae["block_out_channels"]) - 1)
    return PipelineKind(
        pipeline=name,
        two_text_encoders=two_text_encoders,
        tokenizers=tokenizers,
        scheduler=scheduler,
        resolution=config.diffusion.resolution or unet["sample_size"] * step,
        scaling=vae.get("scaling_factor", 0.18215),
    )


def _index(model: str) -> Path:
    """Return the path of `model_index.json`. Raises OSError."""
    if Path(model).is_dir():
        return Path(model) / "model_index.json"
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model, "model_index.json"))


def load_unet(config: TrainConfig, dtype: torch.dtype, *, hollow: bool) -> Any:
    """Return the UNet with weights of `dtype`. `hollow`: True builds it on the meta device. Raises UserFault."""
    from diffusers import UNet2DConditionModel

    with refusals(config):
        if not hollow:
            return UNet2DConditionModel.from_pretrained(
                config.model, subfolder="unet", torch_dtype=dtype, use_safetensors=True
            )
        with torch.device("meta"):
            return UNet2DConditionModel.from_config(
                UNet2DConditionModel.load_config(config.model, subfolder="unet")
            ).to(dtype)


def adapter_targets(model: Any, config: TrainConfig) -> list[str]:
    """Return the names of a UNet's modules for `attention` or `all-linear`; empty if the job lists module names.

    peft resolves these two keywords for models of transformers only.
    """
    configured = config.adapters.targets if config.adapters is not None else ()
    if configured == "attention":
        return list(ATTENTION)
    if configured == "all-linear":
        return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return []


def unet_with_weights(model: Any, state: dict[str, torch.Tensor] | None) -> Any:
    """Return a UNet with the weights of `state`, or the model itself without `state`."""
    if state is None:
        return model
    with torch.device("meta"):
        full_model = type(model).from_config(model.config)
    full_model.load_state_dict(state, assign=True)
    return full_model


def save_lora(folder: Path, kind: PipelineKind, model: Any, state: dict[str, torch.Tensor] | None) -> None:
    """Write the adapters and their settings in the format of `load_lora_weights`."""
    import diffusers
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    layers = {name.removeprefix(PREFIX): t.detach().cpu().contiguous() for name, t in tensors.items()}
    settings = model.peft_config["default"].to_dict()
    metadata = {name: sorted(v) if isinstance(v, set) else v for name, v in settings.items()}
    getattr(diffusers, kind.pipeline).save_lora_weights(
        folder, unet_lora_layers=layers, unet_lora_adapter_metadata=metadata, safe_serialization=True
    )
    for file in folder.glob("*.safetensors"):
        _sort_metadata(file)


def _sort_metadata(file: Path) -> None:
    """Sort the file's metadata, because safetensors writes them in random order.

    Without the sorting a resumed run would write other bytes.
    """
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[end:])


class StableDiffusion:
    """Frozen parts of one pipeline; its kind and its encoders are loaded at their first use."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._encoders: FrozenEncoders | None = None
        self.precision = torch.float32
        """Type in which the text encoders compute. Set before the first call of `encoders`."""

    @functools.cached_property
    def kind(self) -> PipelineKind:
        """Kind of the pipeline. Raises UserFault."""
        return pipeline_kind(self._config)

    def encoders(self, device: torch.device) -> FrozenEncoders:
        """Return the encoders; the first call loads them onto the device. Raises UserFault."""
        if self._encoders is None:
            with refusals(self._config):
                self._encoders = FrozenEncoders(
                    self._config.model, device, self.precision, two_text_encoders=self.kind.two_text_encoders
                )
        return self._encoders

    def pipeline(self, unet: Any, device: torch.device) -> Any:
        """Return the pipeline with the UNet, for samples and for saving. Raises UserFault."""
        import diffusers

        config, kind, encoders = self._config, self.kind, self.encoders(device)
        with refusals(config):
            index = json.loads(_index(config.model).read_text())
            scheduler = getattr(diffusers, index["scheduler"][1]).from_pretrained(config.model, subfolder="scheduler")
        parts: dict[str, Any] = {"vae": encoders.vae, "unet": unet, "scheduler": scheduler}
        parts |= {"text_encoder": encoders.text_encoders[0], "tokenizer": kind.tokenizers[0]}
        if kind.two_text_encoders:
            parts |= {"text_encoder_2": encoders.text_encoders[1], "tokenizer_2": kind.tokenizers[1]}
        else:
            parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        pipeline = getattr(diffusers, kind.pipeline)(**parts)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

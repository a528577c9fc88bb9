"""Tables of traced memory in `trace_tables.json`: the covered models, and the fields that identify a model's sizes.

`python -m benchmarks.memory_tables` writes the file, which is committed.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from broker.estimator.memory.trace_fit import Segments, TracedStep
from broker.model_catalog import catalog, parameter_count

FILE = files(__package__) / "trace_tables.json"
TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
"""Modules of a UNet that get LoRA adapters in the examples of diffusers."""
LATENT_SCALE = 8
"""Pixels of an image's side per pixel of the latent's side."""
FRAMES = 1500
"""Tokens of Whisper's encoder for 30 s of sound."""
SIZES = {
    "whisper": (
        "d_model", "encoder_layers", "decoder_layers", "encoder_ffn_dim", "decoder_ffn_dim", "num_mel_bins",
        "vocab_size", "max_source_positions",
    ),
    "unet": (
        "block_out_channels", "cross_attention_dim", "layers_per_block", "down_block_types", "up_block_types",
        "in_channels", "addition_embed_type",
    ),
}  # fmt: skip
"""Fields that must have the same values in a config as in the config of a traced model."""


def kind_of(config: Mapping[str, Any]) -> str | None:
    """Return `whisper`, `unet`, or None for a model without tables."""
    if config.get("_class_name") == "UNet2DConditionModel":
        return "unet"
    return "whisper" if config.get("model_type") == "whisper" else None


@cache
def document() -> Mapping[str, Any]:
    """Return the content of `trace_tables.json`."""
    read: dict[str, Any] = json.loads(FILE.read_text())
    return read


def find(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Segments]] | None:
    """Return (name, its tables by `key_of`) of the traced model with this config's sizes; None if there is none."""
    try:
        sizes = _sizes(config)
    except ValueError:
        return None
    for name, tables in document()["models"].items():
        entry = catalog.find(name)
        if entry and _sizes(entry.config) == sizes:
            return name, tables
    return None


def _sizes(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the fields that identify a table. Raise ValueError for an impossible config."""
    kind = str(kind_of(config))
    parameters = parameter_count.parameters(config)
    return kind, *(config.get(f) for f in SIZES[kind]), *([parameters] if kind == "unet" else [])


def key_of(method: str, precision: str, checkpointing: bool) -> str:
    """Return the key of a table among the tables of a model."""
    return f"{method} {precision} {'' if checkpointing else 'no-'}gradient-checkpointing"


def names(kind: str) -> tuple[str, ...]:
    """Return the names of the models of `kind` that have tables."""
    every = {name: catalog.find(name) for name in document()["models"]}
    return tuple(name for name, entry in every.items() if entry and kind_of(entry.config) == kind)


def trained_parameters(config: Mapping[str, Any]) -> int:
    """Return the trained parameters of a full fine-tune. Whisper's encoder has positions that are never trained."""
    frozen = config["max_source_positions"] * config["d_model"] if kind_of(config) == "whisper" else 0
    return parameter_count.parameters(config) - frozen


def adapter_parameters(config: Mapping[str, Any], rank: int) -> int:
    """Return the parameters of a LoRA with the traced targets."""
    if kind_of(config) == "unet":
        return rank * _ends_of_unet(config)
    d: int = config["d_model"]
    mlp = [2 * (d + int(config[f"{stack}_ffn_dim"])) for stack in ("encoder", "decoder")]
    encoder, decoder = int(config["encoder_layers"]), int(config["decoder_layers"])
    return rank * (encoder * (8 * d + mlp[0]) + decoder * (16 * d + mlp[1]))


def _ends_of_unet(config: Mapping[str, Any]) -> int:
    """Return the inputs plus outputs of all attention matrices."""
    widths, cross, layers = config["block_out_channels"], config["cross_attention_dim"], config["layers_per_block"]
    depth = config.get("transformer_layers_per_block", 1)
    depths = depth if isinstance(depth, list) else [depth] * len(widths)
    levels = list(zip(widths, depths, strict=True))
    blocks = [levels[-1]]
    for kinds, at, count in (("down_block_types", levels, layers), ("up_block_types", levels[::-1], layers + 1)):
        for kind, level in zip(config[kinds], at, strict=True):
            blocks += [level] * (count if "CrossAttn" in kind else 0)
    return sum(depth * (14 * width + 2 * cross) for width, depth in blocks)


def load_of(config: Mapping[str, Any], rows: int, size: int, rank: int) -> TracedStep:
    """Return the step whose memory the tables give. `size`: tokens that are generated, or pixels of an image's side."""
    if kind_of(config) == "unet":
        latents = (size // LATENT_SCALE) ** 2
        return TracedStep(rows=rows, size=latents, spread=latents, rank=rank)
    return TracedStep(rows=rows, size=size, spread=FRAMES + size, rank=rank)

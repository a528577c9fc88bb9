"""The committed tables of traces: which model they are of, and how its sizes are named.

`trace_tables.json` is written by `python -m benchmarks.memory_tables`.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from broker.estimator.memory.trace_fit import Segments, TracedStep
from broker.model_catalog import catalog as catalogue
from broker.model_catalog import parameter_count as count

FILE = files(__package__) / "trace_tables.json"
TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
"""The modules of a UNet that diffusers' examples adapt."""
SHRUNK = 8
"""Pixels of a side that are one of a latent's."""
FRAMES = 1500
"""Tokens that half a minute of sound has in Whisper's encoder."""
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
"""What a config must have in common with a traced model's."""


def kind_of(config: Mapping[str, Any]) -> str | None:
    """`whisper`, `unet`, or None for what has no tables."""
    if config.get("_class_name") == "UNet2DConditionModel":
        return "unet"
    return "whisper" if config.get("model_type") == "whisper" else None


@cache
def document() -> Mapping[str, Any]:
    """The file."""
    read: dict[str, Any] = json.loads(FILE.read_text())
    return read


def find(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Segments]] | None:
    """(name, its tables by `key_of`) of the traced model that has this config's sizes; None where there is none."""
    try:
        sizes = _sizes(config)
    except ValueError:
        return None
    for name, tables in document()["models"].items():
        known = catalogue.find(name)
        if known and _sizes(known.config) == sizes:
            return name, tables
    return None


def _sizes(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tables are told apart by. Raises ValueError for what can be no such model's."""
    kind = str(kind_of(config))
    parameters = count.parameters(config)
    return kind, *(config.get(f) for f in SIZES[kind]), *([parameters] if kind == "unet" else [])


def key_of(method: str, precision: str, checkpointing: bool) -> str:
    """How the tables of a model are named."""
    return f"{method} {precision} {'' if checkpointing else 'no-'}gradient-checkpointing"


def names(kind: str) -> tuple[str, ...]:
    """The models of that kind that there are tables of."""
    every = {name: catalogue.find(name) for name in document()["models"]}
    return tuple(name for name, known in every.items() if known and kind_of(known.config) == kind)


def trained_parameters(config: Mapping[str, Any]) -> int:
    """Of a full fine-tune: Whisper's encoder has positions that are never trained."""
    frozen = config["max_source_positions"] * config["d_model"] if kind_of(config) == "whisper" else 0
    return count.parameters(config) - frozen


def adapter_parameters(config: Mapping[str, Any], rank: int) -> int:
    """Of a LoRA as the traced one has it."""
    if kind_of(config) == "unet":
        return rank * _ends_of_unet(config)
    d: int = config["d_model"]
    mlp = [2 * (d + int(config[f"{stack}_ffn_dim"])) for stack in ("encoder", "decoder")]
    encoder, decoder = int(config["encoder_layers"]), int(config["decoder_layers"])
    return rank * (encoder * (8 * d + mlp[0]) + decoder * (16 * d + mlp[1]))


def _ends_of_unet(config: Mapping[str, Any]) -> int:
    """Inputs and outputs of all matrices of attention."""
    widths, cross, layers = config["block_out_channels"], config["cross_attention_dim"], config["layers_per_block"]
    depth = config.get("transformer_layers_per_block", 1)
    depths = depth if isinstance(depth, list) else [depth] * len(widths)
    levels = list(zip(widths, depths, strict=True))
    blocks = [levels[-1]]
    for kinds, at, many in (("down_block_types", levels, layers), ("up_block_types", levels[::-1], layers + 1)):
        for kind, level in zip(config[kinds], at, strict=True):
            blocks += [level] * (many if "CrossAttn" in kind else 0)
    return sum(depth * (14 * width + 2 * cross) for width, depth in blocks)


def load_of(config: Mapping[str, Any], rows: int, size: int, rank: int) -> TracedStep:
    """`size`: tokens that are written, or pixels of a side."""
    if kind_of(config) == "unet":
        latents = (size // SHRUNK) ** 2
        return TracedStep(rows=rows, size=latents, spread=latents, rank=rank)
    return TracedStep(rows=rows, size=size, spread=FRAMES + size, rank=rank)

"""The committed tables of traces: which model they are of, and how its sizes are named.

`traced.json` is written by `python -m benchmarks.memory_tables`.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from broker.decide.memory_traced import Load, Segments
from broker.models import catalogue

FILE = files(__package__) / "traced.json"
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
    fields = SIZES[kind_of(config) or "whisper"]
    for name, tables in document()["models"].items():
        known = catalogue.find(name)
        if known and all(known.config.get(f) == config.get(f) for f in fields):
            return name, tables
    return None


def key_of(method: str, precision: str, checkpointing: bool) -> str:
    """How the tables of a model are named."""
    return f"{method} {precision} {'' if checkpointing else 'no-'}gradient-checkpointing"


def load_of(config: Mapping[str, Any], rows: int, size: int, rank: int) -> Load:
    """`size`: tokens that are written, or pixels of a side."""
    if kind_of(config) == "unet":
        latents = (size // SHRUNK) ** 2
        return Load(rows=rows, size=latents, spread=latents, rank=rank)
    return Load(rows=rows, size=size, spread=FRAMES + size, rank=rank)

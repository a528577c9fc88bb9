"""Parameters of a diffusers `UNet2DConditionModel`, as Stable Diffusion 1.5 and SDXL configure it."""

from collections.abc import Mapping, Sequence
from typing import Any


def _linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def _convolution(inputs: int, outputs: int) -> int:
    return _linear(9 * inputs, outputs)


def _resnet(inputs: int, outputs: int, time: int) -> int:
    shortcut = _linear(inputs, outputs) if inputs != outputs else 0
    norms = 2 * inputs + 2 * outputs
    return norms + _convolution(inputs, outputs) + _linear(time, outputs) + _convolution(outputs, outputs) + shortcut


def _transformer(width: int, depth: int, cross: int) -> int:
    """Count self attention, cross attention and a GEGLU MLP, `depth` times, between two projections."""
    attention = 3 * width * width + _linear(width, width)
    crossing = width * width + 2 * cross * width + _linear(width, width)
    block = 6 * width + attention + crossing + _linear(width, 8 * width) + _linear(4 * width, width)
    return 2 * width + 2 * _linear(width, width) + depth * block


def _depths(config: Mapping[str, Any], levels: int) -> Sequence[int]:
    depth = config.get("transformer_layers_per_block", 1)
    return [depth] * levels if isinstance(depth, int) else list(depth)


def unet(config: Mapping[str, Any]) -> int:
    """Return the count. Raise ValueError if a field is missing."""
    try:
        return _count(config)
    except (KeyError, TypeError, IndexError, OverflowError) as e:
        raise ValueError(f"no usable {e}") from None


def _count(config: Mapping[str, Any]) -> int:
    widths: list[int] = list(config["block_out_channels"])
    cross, layers = config["cross_attention_dim"], config["layers_per_block"]
    depths, first, last = _depths(config, len(widths)), widths[0], len(widths) - 1
    time = 4 * first
    total = _linear(first, time) + _linear(time, time)
    if config.get("addition_embed_type") == "text_time":
        total += _linear(config["projection_class_embeddings_input_dim"], time) + _linear(time, time)
    total += _convolution(config["in_channels"], first) + 2 * first + _convolution(first, config["out_channels"])

    before = first
    for n, (kind, width) in enumerate(zip(config["down_block_types"], widths, strict=True)):
        attention = _transformer(width, depths[n], cross) if "CrossAttn" in kind else 0
        total += _resnet(before, width, time) + (layers - 1) * _resnet(width, width, time) + layers * attention
        total += _convolution(width, width) if n < last else 0
        before = width
    total += 2 * _resnet(widths[-1], widths[-1], time) + _transformer(widths[-1], depths[-1], cross)

    back, deep = widths[::-1], depths[::-1]
    for n, (kind, width) in enumerate(zip(config["up_block_types"], back, strict=True)):
        skipped = back[min(n + 1, last)]
        inputs = [before + width, *[2 * width] * (layers - 1), width + skipped]
        total += sum(_resnet(i, width, time) for i in inputs)
        total += (layers + 1) * _transformer(width, deep[n], cross) if "CrossAttn" in kind else 0
        total += _convolution(width, width) if n < last else 0
        before = width
    return total

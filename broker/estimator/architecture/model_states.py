"""Bytes that a step holds from start to end, and bytes that devices exchange; computed without simulation."""

from collections.abc import Mapping
from dataclasses import replace

from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import Numerics, copies, family_spec, layer_matrices, linears, stacks

STATES: Mapping[str, float] = {
    "adamw_fused": 2.0,
    "adamw_foreach": 2.0,
    "adamw_8bit": 2.0,
    "sgd": 0.0,
    "adafactor": 0.0,
}
"""Optimizers, and the number of moments that each keeps per trained weight."""


CODES = 512 + 1024 + 512
"""Bytes of tables for each 4-bit matrix, in the allocator's blocks. They hold the 16 values of NF4, the 256 values of
the quantised scales, and the mean of the scales (bitsandbytes 0.50, `QuantState`).
"""


def adapter_parameters(shape: ModelShape, rank: int, adapted: frozenset[str]) -> int:
    """Return the parameters of LoRA's two matrices, summed over all adapted linear modules."""
    return rank * sum(
        stack.layers * sum(size) * copies(stack, role)
        for stack in stacks(shape)
        for role, size in linears(stack).items()
        if role in adapted
    )


def base_bytes(shape: ModelShape, n: Numerics) -> int:
    """Return the bytes of the base model's weights in the types they are held in."""
    build, parts = family_spec(shape), stacks(shape)
    matrices = sum(s.layers * (layer_matrices(s) - (_unquantised_weights(s) if n.bits else 0)) for s in parts)
    norms = sum(s.layers * (build.norms + (s.decoder_layers > 0)) + 1 for s in parts) * shape.hidden
    head = shape.vocabulary * shape.hidden if n.head_bits else 0
    matrices += head + (shape.tower.matrices if shape.tower else 0)
    width = 4 if n.rest_float32 else n.weight
    rest = (shape.parameters - matrices) * width + (2 * norms if n.norms_float32 else 0)
    if shape.tower and n.adapted:  # its adapters are held too, as if every linear module had one
        rest += n.rank * shape.tower.sides * n.trained
    if n.bits == 4 and n.single_scales:  # the tables and the scale of a block, which are not quantised
        return rest + matrices // 2 + matrices // 64 * 4
    if n.bits == 4:  # NF4 in blocks of 64, whose scales are quantised in blocks of 256 (QLoRA, arXiv 2305.14314)
        unquantised = sum(
            s.layers * copies(s, role) for s in parts for role in linears(s).keys() - family_spec(s).unquantised
        )
        return rest + matrices // 2 + matrices // 64 + matrices // 64 // 256 * 4 + CODES * unquantised
    return rest + matrices * (1 if n.bits == 8 else n.weight)


def _unquantised_weights(stack: ModelShape) -> int:
    """Return the number of weights of a layer's matrices that are never quantised."""
    return sum(i * o for role, (i, o) in linears(stack).items() if role in family_spec(stack).unquantised)


def layer_bytes(shape: ModelShape, n: Numerics) -> int:
    """Return the bytes of one layer's base weights, without the scales of quantised weights (never sharded)."""
    matrices = layer_matrices(shape)
    return matrices // 2 if n.bits == 4 else matrices * (1 if n.bits == 8 else n.weight)


def trained_parameters(shape: ModelShape, n: Numerics) -> int:
    """Return the number of weights that have gradients and optimizer states."""
    if n.full:
        return shape.parameters - (shape.tower.parameters if shape.tower else 0)
    pooler = 2 * shape.hidden * n.rank if "pooler" in n.adapted else 0
    ends = len(n.adapted & {"embeddings", "head"}) * n.rank * (shape.vocabulary + shape.hidden)
    return adapter_parameters(shape, n.rank, n.adapted) + shape.head_parameters + pooler + ends


def embedded(shape: ModelShape) -> int:
    """Return the number of weights in the model's embedding tables: words, learned positions and added embeddings."""
    if shape.head == "image":  # image patches go through a matrix
        return 0
    build = family_spec(shape)
    learned = (shape.max_positions or 0) if not build.rotary and not build.encoder else 0
    return (shape.vocabulary + learned + sum(shape.looked_up)) * shape.hidden


def optimizer_bytes(optimizer: str, width: int, trained: int, whole: int = 0) -> tuple[int, int]:
    """Return (bytes of states, bytes of scratch during the update) for `trained` weights of `width` bytes.

    `whole`: the number of those weights whose states an 8-bit optimizer keeps in float32.
    """
    match optimizer:
        case "adamw_8bit":  # block-wise, a scale for every 256 (arXiv 2110.02861)
            return 2 * (trained - whole) + 2 * 4 * ((trained - whole) // 256) + 2 * 4 * whole, 0
        case "adamw_foreach":  # the square roots of all second moments at once
            return 2 * trained * width, trained * width
        case "adafactor" | "sgd":
            return 0, 0
    return 2 * trained * width, 0


def exchanged(shape: ModelShape, n: Numerics, segment: str, *, ahead: bool = True) -> int:
    """Return the bytes that FSDP 1 holds unsharded within a segment: the root's weights and those of one layer.

    With `ahead`, the pass of a layer also holds the weights of the next layer.
    """
    if segment == "optimizer":
        return 0
    scales = 0
    if n.bits == 4:
        matrices = shape.layers * layer_matrices(shape)
        scales = matrices // 64 + matrices // 64 // 256 * 4
    layer = layer_bytes(shape, n)
    root = base_bytes(shape, n) - scales - layer * shape.layers
    layers = 2 if ahead and "layer" in segment and segment != "backward first layer" else 1
    return root + layers * layer


def divided(shape: ModelShape, parts: int) -> ModelShape:
    """Return the shape of one tensor-parallel device's part: some heads and MLP columns of every layer.

    Raise ValueError if they cannot be divided equally.
    """
    for what, size in (("heads", shape.heads), ("heads of keys", shape.kv_heads), ("columns", shape.intermediate)):
        if size % parts:
            raise ValueError(f"{parts} devices do not divide {size} {what}")
    part = replace(
        shape, heads=shape.heads // parts, kv_heads=shape.kv_heads // parts, intermediate=shape.intermediate // parts
    )
    return replace(part, parameters=shape.parameters - shape.layers * (layer_matrices(shape) - layer_matrices(part)))

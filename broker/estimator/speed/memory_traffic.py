"""Bytes that one step moves through a device's memory, counted by operation.

`fused`: a compiler or a training library joins kernels, so a norm, a rotation or an activation reads and writes once.
Otherwise transformers' modules run as written, and each operation reads its inputs and writes its output.
"""

from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import Numerics, copies, family_spec, linears

LAST = frozenset({"down", "proj"})
"""A layer's last linear module. Its output is not needed again, so a recomputation may stop before it."""
LOGIT_BYTES = 38
"""Bytes per logit and step: written in half precision, cast to float32 for the loss, and the same backward."""
SCORE_ACCESSES = 10
"""Reads and writes of a score of materialised attention: scale, mask, softmax, dropout [assumed]."""
OPTIMIZER_ACCESSES = {"adamw_fused": 7, "adamw_foreach": 20, "adamw_8bit": 3, "adafactor": 12, "sgd": 3}
"""Reads and writes of each trained weight, its gradient and its moments, in their own width. Fused AdamW reads four and
writes three. The foreach variant passes over them operation by operation.
"""
EIGHT_BIT_MOMENTS = 4
"""Bytes of two 8-bit moments, read and written."""
CLIP_ACCESSES = 3
"""Accesses of each gradient: read for the norm, read and written to scale it."""


ROUTED_ACCESSES = 7
"""Accesses of a hidden state for each expert that it passes through: gathered, weighted, and added to the others'
outputs.
"""


def through(shape: ModelShape, role: str) -> int:
    """Return how many matrices of that role a token passes through in a layer: one, or one per active expert."""
    return shape.active_experts if copies(shape, role) > 1 else 1


def _norm_bytes(numerics: Numerics, stream: int, *, fused: bool) -> int:
    """Return the bytes per element.

    An eager RMSNorm casts to float32, squares, averages, multiplies, casts back and multiplies by its weight.
    """
    if fused:
        return 2 * stream
    casts = 0 if stream == 4 else 2 * (stream + 4)
    raised = 6 if numerics.norms_float32 else 0
    return casts + 8 + 4 + 8 + 2 * stream + raised


def _stream(numerics: Numerics) -> int:
    """Return the bytes per element of the hidden states; autocast over float32 weights keeps them in float32."""
    return 4 if numerics.autocast and numerics.weight == 4 else numerics.compute


def layer_bytes(shape: ModelShape, numerics: Numerics, length: float, *, fused: bool) -> float:
    """Return the bytes per token of one layer's forward pass, without its matrix products and adapters."""
    build, s, stream = family_spec(shape), numerics.compute, _stream(numerics)
    active = shape.active_experts or 1
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norm = _norm_bytes(numerics, stream, fused=fused or build.norm == "layer")
    moved: float = build.norms * norm * shape.hidden + 2 * 3 * stream * shape.hidden
    if build.head_norms or shape.head_norms:
        moved += norm * (q + kv)
    if build.rotary:
        moved += (2 if fused else 10) * s * (q + kv)
    moved += ((3 if fused else 5) if shape.gated_mlp else 2) * s * shape.intermediate * active
    if shape.experts:
        moved += ROUTED_ACCESSES * s * shape.hidden * active
    if stream > s:
        cast = ((role, inputs) for role, (inputs, _) in linears(shape).items() if role not in LAST)
        moved += sum((stream + s) * inputs * through(shape, role) for role, inputs in cast)
    if numerics.attention == "eager" or build.broadcast:
        moved += SCORE_ACCESSES * s * shape.heads * length
    return moved


def adapter_bytes(shape: ModelShape, numerics: Numerics) -> float:
    """Return the bytes per token of the adapters in one layer's forward pass.

    peft casts an adapter's input to float32, applies dropout, and adds its scaled output. Without autocast all of that
    stays in float32.
    """
    s = numerics.compute
    widths = [(size, through(shape, role)) for role, size in linears(shape).items() if role in numerics.adapted]
    dropped = 9 if numerics.dropout else 0
    raised = (s + 4) if s < 4 else 0
    read = 6 + s if numerics.autocast else 4
    result = 6 * s if numerics.autocast or s == 4 else 4 + 8 + (s + 8) + (4 + s)
    return sum(((raised + dropped + read) * inputs + result * outputs) * n for (inputs, outputs), n in widths)


def weight_bytes(numerics: Numerics, products: float) -> float:
    """Return the bytes per weight of the layers in a micro-batch. `products`: matrix products that read each weight."""
    if numerics.bits:
        return products * (numerics.bits / 8 + 2 * numerics.compute)
    cast = numerics.weight + numerics.compute if numerics.weight > numerics.compute else 0
    return products * numerics.compute + cast + (2 * numerics.trained if numerics.full else 0)


def optimizer_bytes(optimizer: str, width: int) -> int:
    """Return the bytes per trained weight and step, with gradient clipping.

    `width`: bytes of each weight and moment.
    """
    moments = EIGHT_BIT_MOMENTS if optimizer == "adamw_8bit" else 0
    return (OPTIMIZER_ACCESSES[optimizer] + CLIP_ACCESSES) * width + moments

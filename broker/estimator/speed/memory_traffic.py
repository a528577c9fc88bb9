"""Bytes that one step moves through a device's memory, counted operation by operation.

`fused`: kernels that a compiler or a training library joins, so a norm, a rotation or an activation reads and writes
once; else transformers' modules as they are written, each operation reading its inputs and writing its output.
"""

from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import Numerics, copies, family_spec, linears

LAST = frozenset({"down", "proj"})
"""A layer's last linear module: nobody needs its output again, so a recomputation may stop before it."""
LOGIT_BYTES = 38
"""Per logit and step: written in half precision, raised to float32 for the loss, and all that back."""
SCORE_ACCESSES = 10
"""Reads and writes of a score where attention is written out: scaled, masked, softmax, dropout [assumed]."""
OPTIMIZER_ACCESSES = {"adamw_fused": 7, "adamw_foreach": 20, "adamw_8bit": 3, "adafactor": 12, "sgd": 3}
"""Reads and writes of each trained weight, its gradient and its moments, in their own width. Fused AdamW reads four
and writes three; the foreach one passes over them operation by operation."""
EIGHT_BIT_MOMENTS = 4
"""Bytes of two 8-bit moments, read and written."""
CLIP_ACCESSES = 3
"""Of each gradient: read for the norm, read and written to scale it."""


ROUTED_ACCESSES = 7
"""Of a hidden state for each expert that it goes through: gathered, weighted, and added to the others' outputs."""


def through(shape: ModelShape, role: str) -> int:
    """How many such matrices of a layer a token goes through: one, or one for each expert that is chosen for it."""
    return shape.active_experts if copies(shape, role) > 1 else 1


def _norm_bytes(numerics: Numerics, stream: int, *, fused: bool) -> int:
    """Per element. An eager RMSNorm: raised to float32, squared, averaged, multiplied, lowered, weighted."""
    if fused:
        return 2 * stream
    casts = 0 if stream == 4 else 2 * (stream + 4)
    raised = 6 if numerics.norms_float32 else 0
    return casts + 8 + 4 + 8 + 2 * stream + raised


def _stream(numerics: Numerics) -> int:
    """Bytes an element of what flows between the layers: autocast over float32 weights keeps it in float32."""
    return 4 if numerics.autocast and numerics.weight == 4 else numerics.compute


def layer_bytes(shape: ModelShape, numerics: Numerics, length: float, *, fused: bool) -> float:
    """Per token of one layer's forward pass, its matrix products and adapters left out."""
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
    """Per token of one layer's forward pass: peft raises an adapter's input to float32, drops out, and adds its output
    scaled; without autocast all that stays in float32.
    """
    s = numerics.compute
    widths = [(size, through(shape, role)) for role, size in linears(shape).items() if role in numerics.adapted]
    dropped = 9 if numerics.dropout else 0
    raised = (s + 4) if s < 4 else 0
    read = 6 + s if numerics.autocast else 4
    result = 6 * s if numerics.autocast or s == 4 else 4 + 8 + (s + 8) + (4 + s)
    return sum(((raised + dropped + read) * inputs + result * outputs) * n for (inputs, outputs), n in widths)


def weight_bytes(numerics: Numerics, products: float) -> float:
    """Per weight of the layers and micro-batch, read for so many products of each."""
    if numerics.bits:
        return products * (numerics.bits / 8 + 2 * numerics.compute)
    cast = numerics.weight + numerics.compute if numerics.weight > numerics.compute else 0
    return products * numerics.compute + cast + (2 * numerics.trained if numerics.full else 0)


def optimizer_bytes(optimizer: str, width: int) -> int:
    """Per trained weight and step, with the clipping of its gradient. `width`: bytes of each weight and moment."""
    moments = EIGHT_BIT_MOMENTS if optimizer == "adamw_8bit" else 0
    return (OPTIMIZER_ACCESSES[optimizer] + CLIP_ACCESSES) * width + moments

"""Peak memory of a decoder's fine-tune in closed form.

What a layer keeps for its backward pass is linear in its widths: hidden h, queries q, keys kv, intermediate i. The
coefficients follow from what autograd saves; they are exact for llama and qwen2 layers under transformers 5.17, torch
2.13 and peft 0.21 (a test counts the saved tensors of real models). Full bf16 with h 16, q 4, kv 4, i 8 is the
20 h + 4 kv + 8 i + 4 heads of a shape with q = h. Four moments can be the peak: the end of the forward pass, the
backward passes of the last and of the first layer, and the optimizer step (fused AdamW: no copies).
"""

from dataclasses import dataclass

from broker.domain.offer import GIB, MemoryNeed, ModelShape, Workload

LOGIT_BYTES = 12
"""fp32 logits, their log-softmax and its gradient."""
GPU_CONTEXT = GIB * 3 // 4
"""CUDA context and cuBLAS workspaces."""
CPU_CONTEXT = GIB
"""Python with torch, transformers and peft, resident."""
MEASURED = frozenset({"llama", "mistral"})
"""Families whose published peaks the form was compared with."""
QK_NORMED = frozenset({"qwen3"})
"""Families that normalise queries and keys, and keep both for it."""


@dataclass(frozen=True, kw_only=True)
class Regime:
    """Bytes per element under a method and a precision."""

    weight: int
    state: int
    """Of each gradient and each of AdamW's two moments."""
    compute: int
    h: int
    q: int
    kv: int
    i: int
    adapter: int = 0
    """Dropped-out input of an adapter, per element."""
    rank: int = 0
    """Output of an adapter's first matrix."""
    autocast: bool = False
    """Trained weights are cast for each forward pass, and the casts are kept until it ends."""


# What the trainer does: a LoRA base in the compute precision, all that is trained in fp32, autocast around both.
FULL_FP32 = Regime(weight=4, state=4, compute=4, h=24, q=8, kv=8, i=16)
FULL_HALF = Regime(weight=4, state=4, compute=2, h=26, q=4, kv=4, i=8, autocast=True)
LORA_FP32 = Regime(weight=4, state=4, compute=4, h=8, q=8, kv=8, i=12, adapter=4, rank=4)
LORA_HALF = Regime(weight=2, state=4, compute=2, h=8, q=4, kv=4, i=6, adapter=2, rank=2, autocast=True)


def adapter_parameters(shape: ModelShape, r: int, targets: str) -> int:
    """Parameters of LoRA adapters of rank `r`: r x (inputs + outputs) of every target."""
    h, i, q, kv = shape.hidden, shape.intermediate, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = (h + q) + 2 * (h + kv) + (q + h)
    if targets == "all-linear":
        layer += (3 if shape.gated_mlp else 2) * (h + i)
    return shape.layers * r * layer


def target_inputs(shape: ModelShape, targets: str) -> int:
    """Sum of the input widths of one layer's LoRA targets."""
    width = 3 * shape.hidden + shape.heads * shape.head_dim
    if targets == "all-linear":
        width += (2 if shape.gated_mlp else 1) * shape.hidden + shape.intermediate
    return width


def trainable_parameters(workload: Workload, shape: ModelShape) -> int:
    """What the optimizer holds states for."""
    if workload.method == "lora":
        return adapter_parameters(shape, workload.lora_r, workload.lora_targets)
    return shape.parameters


def regime_of(workload: Workload, *, bf16: bool) -> Regime:
    """How the trainer holds weights and computes; `bf16`: the device has it, which is what precision `auto` takes."""
    half = workload.precision in ("bf16", "fp16") or (workload.precision == "auto" and bf16)
    if workload.method == "lora":
        return LORA_HALF if half else LORA_FP32
    return FULL_HALF if half else FULL_FP32


def layer_activations(workload: Workload, shape: ModelShape, regime: Regime, *, gpu: bool) -> int:
    """Bytes per token that one layer keeps for its backward pass; dropout masks are bool on CUDA, fp32 on a CPU."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    kept = regime.h * shape.hidden + regime.q * q + regime.kv * kv + regime.i * shape.intermediate
    kept += 4 * shape.heads + 8
    if shape.family in QK_NORMED:
        kept += 3 * regime.compute * (q + kv) + 4 * (shape.heads + shape.kv_heads)
    if workload.method == "lora":
        linears = 4 + ((3 if shape.gated_mlp else 2) if workload.lora_targets == "all-linear" else 0)
        kept += (regime.adapter + (1 if gpu else 4)) * target_inputs(shape, workload.lora_targets)
        kept += regime.rank * workload.lora_r * linears
    return kept


def _evidence(shape: ModelShape, autocast: bool, devices: int) -> tuple[float, str]:
    if not shape.known:
        return 1.0, f"closed form x 2: architecture {shape.family!r} was never checked against a measurement"
    if shape.family not in MEASURED:
        return 0.10, f"closed form; {shape.family} is alike but its peaks were not measured"
    if autocast or devices > 1:
        return 0.10, f"closed form; {'autocast' if autocast else 'several GPUs'} was not measured"
    return 0.02, f"closed form, checked on {shape.family}"


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes at the worst moment of a step."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int


def peak(workload: Workload, shape: ModelShape, regime: Regime, *, gpu: bool = True) -> Peak:
    """Allocated bytes of one device that holds everything, without context and margin."""
    lora = workload.method == "lora"
    trained = trainable_parameters(workload, shape)
    gradients = trained * regime.state
    tokens = workload.micro_batch * workload.sequence
    layer = tokens * layer_activations(workload, shape, regime, gpu=gpu)
    one_input = tokens * shape.hidden * regime.compute
    checkpointing = workload.gradient_checkpointing
    held = shape.layers * (one_input if checkpointing else layer)
    casts = trained * 2 if regime.autocast else 0
    kept_casts = casts // shape.layers if checkpointing else casts
    transient = 2 * tokens * shape.intermediate * regime.compute
    recomputed = layer if checkpointing else 0
    embedding = 0 if lora else shape.vocabulary * shape.hidden * regime.state
    accumulated = gradients if workload.global_batch > workload.micro_batch else 0
    last = max(accumulated, embedding)
    first = max(accumulated, gradients if shape.tied_embeddings else gradients - embedding)
    # (gradients, activations, logits): end of the forward pass, last and first layer's backward pass, optimizer step
    moments = (
        (accumulated, held + 6 * tokens * shape.hidden + casts, tokens * shape.vocabulary * LOGIT_BYTES),
        (last, held + recomputed + transient + kept_casts, 0),
        (first, one_input + layer + transient + casts // shape.layers, 0),
        (gradients, 0, 0),
    )
    at_peak = max(moments, key=sum)
    return Peak(
        weights=shape.parameters * regime.weight + (trained * regime.state if lora else 0),
        gradients=at_peak[0],
        optimizer=2 * gradients,
        activations=at_peak[1],
        logits=at_peak[2],
    )


def memory(workload: Workload, *, bf16: bool, gpu: bool, devices: int = 1) -> MemoryNeed | None:
    """What one device must have; None for a script, about which nothing is known.

    `bf16`: the device computes in it. `gpu`: False for a CPU, whose context is the process itself. `devices`: each of
    several holds everything, and the buckets of the gradients' all-reduce besides.
    """
    shape = workload.shape
    if shape is None:
        return None
    regime = regime_of(workload, bf16=bf16)
    found = peak(workload, shape, regime, gpu=gpu)
    buckets = trainable_parameters(workload, shape) * regime.state if devices > 1 else 0
    margin, source = _evidence(shape, regime.autocast, devices)
    return MemoryNeed(
        weights=found.weights,
        gradients=found.gradients + buckets,
        optimizer=found.optimizer,
        activations=found.activations,
        logits=found.logits,
        context=GPU_CONTEXT if gpu else CPU_CONTEXT,
        margin=margin,
        source=source,
    )

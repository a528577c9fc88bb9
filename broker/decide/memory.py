"""Peak memory of a decoder's fine-tune in closed form.

Activations per layer and token of Hugging Face's eager layers with a fused attention, bf16, in bytes:
16 h + 4 q + 4 kv + 8 i + 4 a (h hidden, q and kv widths of queries and keys, i intermediate, a heads), which is the
20 h + 4 kv + 8 i + 4 a of a shape with q = h. Checked against a full trace of Llama-3-8B and against measured A100
peaks (docs/estimation.md). Three moments can be the peak: the end of the forward pass, the backward pass of the
first or the last layer, and the optimizer step.
"""

from dataclasses import dataclass

from broker.domain.offer import GIB, MemoryNeed, ModelShape, Workload

LOGIT_BYTES = 12
"""bf16 or fp32 logits, their fp32 log-softmax and its gradient (transformers 4.49 and later; 14 in 4.48)."""
GPU_CONTEXT = GIB * 3 // 4
"""CUDA context and cuBLAS workspaces."""
CPU_CONTEXT = GIB
"""Python with torch, transformers and peft, resident."""
MEASURED = frozenset({"llama", "mistral"})
"""Families whose measured peaks the form was compared with."""
QK_NORMED = frozenset({"qwen3"})
"""Families that normalise queries and keys, and keep both for it."""


@dataclass(frozen=True, kw_only=True)
class _Bytes:
    """Bytes per element under a precision."""

    weight: int
    compute: int
    autocast: bool


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


def _bytes_of(precision: str, bf16: bool) -> _Bytes:
    if precision == "fp16":  # without fp32 masters the gradient scaler has nothing to scale for
        return _Bytes(weight=4, compute=2, autocast=True)
    if precision == "bf16" or (precision == "auto" and bf16):
        return _Bytes(weight=2, compute=2, autocast=False)
    return _Bytes(weight=4, compute=4, autocast=False)


def layer_activations(workload: Workload, shape: ModelShape, *, compute: int, gpu: bool) -> int:
    """Bytes per token that one layer keeps for its backward pass; `compute`: bytes of an element."""
    h, i, q, kv = shape.hidden, shape.intermediate, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    base = 16 * h + 4 * q + 4 * kv + 8 * i
    if shape.family in QK_NORMED:
        base += 6 * (q + kv)
    adapters = 0
    if workload.method == "lora":
        # Frozen layers keep neither their inputs (2h + 2h + 2i) nor the norms' (4h); each adapter keeps its
        # dropped-out fp32 input with its mask (bool on CUDA, fp32 on a CPU), and its r outputs.
        base -= 8 * h + 2 * i
        linears = 4 + ((3 if shape.gated_mlp else 2) if workload.lora_targets == "all-linear" else 0)
        adapters = (4 + (1 if gpu else 4)) * target_inputs(shape, workload.lora_targets) + 4 * workload.lora_r * linears
    return base * compute // 2 + adapters + 4 * shape.heads


def _evidence(shape: ModelShape, autocast: bool) -> tuple[float, str]:
    if not shape.known:
        return 1.0, f"closed form x 2: architecture {shape.family!r} was never checked against a measurement"
    if autocast:
        return 0.10, "closed form, autocast"
    if shape.family in MEASURED:
        return 0.02, f"closed form, checked on {shape.family}"
    return 0.10, f"closed form, {shape.family} is alike but was not measured"


def memory(workload: Workload, *, bf16: bool, gpu: bool) -> MemoryNeed | None:
    """Peak bytes of one device that holds everything; None for a script, about which nothing is known.

    `bf16`: the device computes in it, which is what precision `auto` takes. `gpu`: False for a CPU, whose context is
    the process itself.
    """
    shape = workload.shape
    if shape is None:
        return None
    size = _bytes_of(workload.precision, bf16)
    lora = workload.method == "lora"
    trained = trainable_parameters(workload, shape)
    state = 4 if lora else size.weight
    weights = shape.parameters * size.weight + (trained * 4 if lora else 0)
    gradients, optimizer = trained * state, 2 * trained * state
    tokens = workload.micro_batch * workload.sequence
    layer = tokens * layer_activations(workload, shape, compute=size.compute, gpu=gpu)
    one_input = tokens * shape.hidden * size.compute
    held = shape.layers * (one_input if workload.gradient_checkpointing else layer)
    casts = shape.parameters * 2 if size.autocast else 0
    logits = tokens * shape.vocabulary * LOGIT_BYTES
    head = tokens * 6 * shape.hidden
    transient = 2 * tokens * shape.intermediate * size.compute
    recomputed = layer if workload.gradient_checkpointing else 0
    embedding = 0 if lora else shape.vocabulary * shape.hidden * state
    accumulated = gradients if workload.global_batch > workload.micro_batch else 0
    last = max(accumulated, embedding)
    first = max(accumulated, gradients if shape.tied_embeddings else gradients - embedding)
    # (gradients, activations, logits): end of the forward pass, last and first layer's backward pass, optimizer step
    moments = (
        (accumulated, held + head + casts, logits),
        (last, held + recomputed + transient + casts, 0),
        (first, one_input + layer + transient + casts, 0),
        (gradients, 0, 0),
    )
    at_peak = max(moments, key=sum)
    margin, source = _evidence(shape, size.autocast)
    return MemoryNeed(
        weights=weights, gradients=at_peak[0], optimizer=optimizer, activations=at_peak[1], logits=at_peak[2],
        context=GPU_CONTEXT if gpu else CPU_CONTEXT, margin=margin, source=source,
    )  # fmt: skip

"""Device memory that a job of gpubroker's own trainer needs; `simulator` computes the peak."""

from dataclasses import replace
from typing import Literal

from broker.domain.offer import GIB
from broker.domain.workload import MemoryNeed, ModelShape, Workload
from broker.estimator.architecture.families import ATTENTION_ROLES, Numerics, family_spec
from broker.estimator.architecture.lora_targets import choose
from broker.estimator.memory.estimate import adapted_modules
from broker.estimator.memory.evidence import FORMULA, TRACED_OPTIMIZERS, evidence_of
from broker.estimator.memory.simulator import simulate
from broker.estimator.memory.simulator.library_versions import attention_of, is_quantised
from broker.estimator.memory.simulator.types import Step

GPU_CONTEXT = GIB * 3 // 4
"""Bytes of the CUDA context and the cuBLAS workspaces."""
CPU_CONTEXT = GIB
"""Resident bytes of Python with torch, transformers and peft."""


def adapted(workload: Workload, shape: ModelShape) -> frozenset[str]:
    """Return the roles of the modules that get an adapter."""
    names = family_spec(shape).names
    if workload.method == "full":
        return frozenset()
    every = adapted_modules(shape, ("all-linear",))[0]
    if workload.lora_targets == "all-linear":
        return every
    if workload.lora_targets != "attention":
        linear = tuple((role, name) for role, name in names.items() if role in every)
        targets = tuple(workload.lora_targets.split(","))
        try:
            return choose(shape, targets, linear).roles
        except ValueError:  # a target without an estimated adapter, such as the head of a T5
            return choose(shape, tuple(name for name in targets if name in names.values()), linear).roles
    others = {name for role, name in names.items() if role not in ATTENTION_ROLES}
    return frozenset(role for role in ATTENTION_ROLES & names.keys() if names[role] not in others)


def bits_of(workload: Workload) -> Literal[0, 4, 8]:
    """Return the bits of a weight of the base's linear modules; 0: not quantised."""
    return 4 if workload.method == "qlora" else 8 if workload.method == "lora8" else 0


def may_shard(workload: Workload) -> bool:
    """Return whether a plan may shard the workload with FSDP.

    The trainer must support it, and its simulated memory must have been compared with the tracer.
    """
    return (
        workload.shape is not None
        and workload.task == "causal_lm"
        and can_shard(workload.shape, workload.method, workload.optimizer, workload.precision)
    )


def can_shard(shape: ModelShape, method: str, optimizer: str, precision: str) -> bool:
    """Return whether FSDP can shard a training with these properties.

    The model must be a decoder language model without a quantised base. The optimizer must keep states in the shapes of
    the weights. fp16 is excluded, because its gradient scaler was never run on shards.
    """
    decoder = shape.head == "tokens" and not shape.decoder_layers and not precision.startswith("fp16")
    return decoder and method in ("full", "lora") and optimizer not in ("adamw_8bit", "adafactor")


def evidence(workload: Workload, shape: ModelShape, *, several: bool) -> tuple[str, float]:
    """Return (evidence in words, margin) of the workload's memory estimate."""
    _, words, margin = evidence_of(shape, several=several)
    untraced: list[str] = []
    untraced += [workload.method] if bits_of(workload) else []
    untraced += [workload.optimizer] if workload.optimizer not in TRACED_OPTIMIZERS else []
    untraced += [workload.attention] if workload.attention == "eager" else []
    if not untraced or margin > FORMULA:
        return words, margin
    return f"{shape.family} with {', '.join(untraced)}: by formula, not traced", FORMULA


def numerics_of(workload: Workload, shape: ModelShape, *, bf16: bool, gpu: bool) -> Numerics:
    """Return the types that the trainer uses.

    A LoRA base has the compute precision, trained weights have float32, and autocast is around both. `bf16`: the device
    supports bf16, which precision `auto` then selects.
    """
    half = workload.precision in ("bf16", "fp16") or (workload.precision == "auto" and bf16)
    full = workload.method == "full"
    return Numerics(
        weight=2 if half and not full else 4,
        trained=4,
        compute=2 if half else 4,
        full=full,
        autocast=half,
        bits=bits_of(workload) if is_quantised(shape.family, None) else 0,
        norms_float32=half and bits_of(workload) > 0,
        attention=attention_of(shape.family, None, workload.attention),
        rank=workload.lora_r,
        adapted=adapted(workload, shape),
        mask=1 if gpu else 0,
    )


def gathered(numerics: Numerics) -> Numerics:
    """Return the types under FSDP 2, which casts what it gathers."""
    return replace(numerics, weight=numerics.compute, adapters=numerics.compute, norms_float32=False)


def memory(workload: Workload, *, bf16: bool, gpu: bool, devices: int = 1) -> MemoryNeed | None:
    """Return the memory that one device must have; None for a script, whose memory is unknown.

    `bf16`: the device computes in bf16. `gpu`: False for a CPU, whose context is the process itself. `devices`: number
    of devices that share the global batch. Each holds the whole model; several also hold all-reduce buckets.
    """
    shape = workload.shape
    if shape is None:
        return None
    step = Step(
        numerics=numerics_of(workload, shape, bf16=bf16, gpu=gpu),
        rows=workload.micro_batch,
        length=workload.sequence,
        target=workload.target_tokens if shape.decoder_layers else 0,
        checkpointing=workload.gradient_checkpointing,
        accumulated=workload.global_batch > workload.micro_batch * devices,
        optimizer=workload.optimizer,
        replicas=devices,
    )
    step_peak = simulate(shape, step)
    by = step_peak.segments[step_peak.worst]
    source, margin = evidence(workload, shape, several=devices > 1)
    return MemoryNeed(
        weights=by["weights"],
        gradients=by["gradients"] + by.get("communication", 0),
        optimizer=by["optimizer"],
        activations=by["activations"] + by["temporary"],
        logits=by["logits"],
        context=GPU_CONTEXT if gpu else CPU_CONTEXT,
        margin=margin,
        source=source,
    )

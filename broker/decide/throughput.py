"""Time of a workload on one machine: a roofline of GEMM, attention, elementwise, optimizer and all-reduce, with the
host's launch rate as a floor.

The efficiencies were fitted on 209 llm-foundry rows (median error 2.8 % in sample, 4.1 % on an unseen model size,
19.5 % on an unseen GPU); the extra of LoRA on two rows of fms-acceleration (docs/estimation.md).
"""

from dataclasses import dataclass

from broker.decide.hardware import Hardware
from broker.decide.memory import target_inputs, trainable_parameters
from broker.domain.offer import ModelShape, Workload

HIDDEN_VECTORS = 83
"""Vectors of width h that a layer reads and writes outside its GEMMs, per pass; fitted (16 x 5.19)."""
LORA_BYTES = 56
"""Bytes moved per element of an adapter's input and pass (casts, dropout, addition); set on two measured rows."""
LOGIT_TRAFFIC = 24
"""Bytes moved per logit."""
OPTIMIZER_BYTES = 28
"""Bytes moved per trained parameter by AdamW."""
LAYER_LAUNCH_S = 0.25e-3
"""A Python host needs so long to launch one pass of an eager layer [assumed]; adapters double it."""
COMMUNICATION, EXPOSED, HIDEABLE = 2.41, 0.44, 0.7
"""Fitted: the all-reduce's slowdown, its share that is never hidden, the share of the compute that can hide it."""
NETWORK = 10e9
"""Effective bytes/s of an all-reduce between machines [assumed]: 100 Gbit/s, less the protocol."""
SNAPSHOT_BYTES_PER_S = 2e9
"""Device to host memory [assumed]: the part of a save that the loop waits for."""
DOWNLOAD_BYTES_PER_S, READ_BYTES_PER_S = 200e6, 1e9
"""Weights from the Hub, and from a disk of this machine [assumed]."""
START_S = 15.0
"""Imports, model construction and the first compilation of kernels [assumed]."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds; P50 unless named. `spread`: P90 / P50 of the work."""

    step_s: float
    work_s: float
    """Steps, evaluations and the stall of checkpoints, without set-up."""
    load_s: float
    """From the agent's first beat to the first step."""
    spread: float


def useful_devices(workload: Workload, gpus: int) -> int:
    """How many data-parallel devices a machine with `gpus` keeps busy: each must get as many micro-batches a step."""
    micro_batches = workload.global_batch // workload.micro_batch
    return max(d for d in range(1, max(1, min(gpus, micro_batches)) + 1) if micro_batches % d == 0)


def _precision(workload: Workload, hardware: Hardware) -> tuple[float, int]:
    """(peak FLOP/s, bytes per element)."""
    if workload.precision in ("bf16", "fp16") or (workload.precision == "auto" and hardware.bf16):
        return hardware.bf16_flops, 2
    return hardware.fp32_flops, 4


def _token_s(
    workload: Workload, shape: ModelShape, hardware: Hardware, cores: int, passes: float, gemms: float
) -> float:
    """Seconds per token for a number of elementwise passes and GEMM passes (forward 1; backward 2, or 1 if frozen)."""
    peak, size = _precision(workload, hardware)
    peak, bandwidth = peak * cores, hardware.bandwidth * cores
    embedding = 0 if shape.tied_embeddings else shape.vocabulary * shape.hidden
    gemm = 2 * (shape.parameters - embedding) * gemms / (peak * hardware.gemm_efficiency)
    # Causal: half of 4 L q S. The backward pass of a fused attention costs 2.5 times its forward pass.
    attention = 2 * shape.layers * shape.heads * shape.head_dim * workload.tokens_per_row
    attention *= passes if passes <= 1 else passes + 0.5
    moved = shape.layers * shape.hidden * HIDDEN_VECTORS * size * passes + shape.vocabulary * LOGIT_TRAFFIC
    if workload.method == "lora":
        moved += shape.layers * target_inputs(shape, workload.lora_targets) * LORA_BYTES * passes
    return gemm + attention / (peak * hardware.attention_efficiency) + moved / bandwidth


def step_seconds(
    workload: Workload, shape: ModelShape, hardware: Hardware, *, cores: int = 1, devices: int = 1, nodes: int = 1
) -> float:
    """Seconds of one optimizer step, all micro-batches included. `cores`: of a CPU; 1 for GPUs.

    `devices`: of all `nodes` machines together.
    """
    again = 1 if workload.gradient_checkpointing else 0
    lora = workload.method == "lora"
    passes, gemms = 3 + again, (2 if lora else 3) + again
    rows = workload.global_batch / devices
    compute = rows * workload.tokens_per_row * _token_s(workload, shape, hardware, cores, passes, gemms)
    if hardware.gpu:
        launches = rows / workload.micro_batch * shape.layers * passes * (2 if lora else 1)
        compute = max(compute, launches * LAYER_LAUNCH_S)
    trained = trainable_parameters(workload, shape)
    optimizer = trained * OPTIMIZER_BYTES / (hardware.bandwidth * cores)
    reduce = COMMUNICATION * 2 * (devices - 1) / devices * trained * (4 if lora else 2)
    reduce /= hardware.link if nodes == 1 else min(hardware.link, NETWORK)
    return compute + optimizer + max(0.0, reduce - HIDEABLE * compute) + EXPOSED * reduce


def pace(
    workload: Workload, hardware: Hardware, *, cores: int = 1, devices: int = 1, nodes: int = 1, local: bool = False
) -> Pace | None:
    """Time of the whole workload; None for a script. `local`: the weights lie on this machine."""
    shape = workload.shape
    if shape is None:
        return None
    cores = 1 if hardware.gpu else max(1, cores)
    step = step_seconds(workload, shape, hardware, cores=cores, devices=devices, nodes=nodes)
    eval_tokens = workload.eval_rows * workload.tokens_per_row
    evaluation = eval_tokens * _token_s(workload, shape, hardware, cores, 1, 1) / devices
    states = trainable_parameters(workload, shape) * 12
    stall = states / SNAPSHOT_BYTES_PER_S / workload.checkpoint_every_s
    rate = READ_BYTES_PER_S if local else DOWNLOAD_BYTES_PER_S
    return Pace(
        step_s=step,
        work_s=(workload.steps * step + evaluation) * (1 + stall),
        load_s=START_S + 2 * shape.parameters / rate,
        spread=hardware.spread,
    )

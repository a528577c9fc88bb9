"""Time of a workload on one machine: the roofline's terms for the trainer's own step, and how far they may be off."""

from dataclasses import dataclass, replace
from math import exp, expm1

from broker.decide.calibration import (
    FITTED,
    SPREAD_COUNTED,
    SPREAD_CPU,
    SPREAD_MEASURED,
    SPREAD_MIXTURE,
    SPREAD_UNMEASURED,
    Belief,
)
from broker.decide.hardware import Hardware
from broker.decide.memory import numerics_of
from broker.decide.memory_builds import build_of
from broker.decide.memory_held import trained_parameters
from broker.decide.roofline import Run, ideal, terms
from broker.domain.workload import ModelShape, Parallelism, Workload

SNAPSHOT_BYTES_PER_S = 2e9
"""Device to host memory [assumed]: the part of a save that the loop waits for."""
DOWNLOAD_BYTES_PER_S, READ_BYTES_PER_S = 200e6, 1e9
"""Weights from the Hub, and from a disk of this machine [assumed]."""
WEIGHT_BYTES, STATE_BYTES = 2, 12
"""Of a parameter on the Hub, and of a trained one in a checkpoint."""
START_S = 15.0
"""Imports, model construction and the first compilation of kernels [assumed]."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds; P50 unless named. `spread`: P90 / P50 of the work."""

    step_s: float
    work_s: float
    """Steps and evaluations."""
    stall_s: float
    """For which training stands still at a checkpoint."""
    training_s: float
    evaluation_s: float
    load_s: float
    """From the agent's first beat to the first step."""
    spread: float
    checkpoint_bytes: int
    """Trained weights and two moments in float32."""
    fetched_bytes: int
    """The model's weights and the data set."""
    evidence: str = ""
    """What the speed rests on."""
    runs: int = 0
    """Own runs on such hardware that it rests on."""


def spread_of(run: Run, hardware: Hardware) -> tuple[float, str]:
    """(factor, evidence): tokens/s lie between the estimate over the factor and times it; see `calibration`."""
    if not hardware.gpu:
        return SPREAD_CPU, "one core's rate, by one measurement on two cores"
    if run.numerics.bits == 8:
        return SPREAD_CPU, "no run on an 8-bit base was measured, and its kernels are not counted: a factor of two"
    fitted, several = hardware.name in FITTED.matmul, run.sharding in ("ddp", "hybrid")
    if run.shape.labels or run.shape.decoder_layers:
        head = "an encoder" if build_of(run.shape).encoder else "a decoder with such a head"
        what = "an encoder-decoder" if run.shape.decoder_layers else head
        return SPREAD_COUNTED, f"operations of {what} counted, none was measured; interval [assumed]"
    if run.shape.experts:
        if fitted and not several:
            return (
                SPREAD_MIXTURE,
                "experts counted by those that are active; as wide as the worst of 10 runs of Mixtral",
            )
        return SPREAD_COUNTED, f"no run of a mixture of experts on the {hardware.name}; interval [assumed]"
    worst = "interval as wide as the worst of 237 runs on unseen GPUs"
    if not fitted:
        return SPREAD_UNMEASURED, f"nothing fitted on the {hardware.name}: shares of other GPUs' runs; {worst}"
    if several or run.reference:
        what = run.sharding.upper() if several else "a reference"
        return SPREAD_UNMEASURED, f"fitted on runs on the {hardware.name}, none with {what}; {worst}"
    return SPREAD_MEASURED, f"fitted on runs on the {hardware.name}; 90 % interval"


def run_of(
    workload: Workload,
    shape: ModelShape,
    hardware: Hardware,
    *,
    devices: int = 1,
    nodes: int = 1,
    parallelism: Parallelism = "ddp",
) -> Run:
    """One step of the trainer on one of `devices`, which are on `nodes` machines together."""
    numerics = numerics_of(workload, shape, bf16=hardware.bf16, gpu=hardware.gpu)
    if devices > 1 and parallelism in ("fsdp", "hybrid"):
        numerics = replace(numerics, weight=numerics.compute, autocast=False)  # FSDP casts what it gathers
    return Run(
        shape=shape,
        numerics=numerics,
        tokens=workload.micro_batch * workload.sequences * workload.tokens_per_row,
        length=workload.tokens_per_row,
        written=workload.micro_batch * workload.written_per_row,
        written_length=workload.written_per_row,
        trained=trained_parameters(shape, numerics),
        micro_batches=workload.global_batch / devices / workload.micro_batch,
        recompute="early" if workload.gradient_checkpointing else "none",
        optimizer=workload.optimizer,
        reference=workload.reference,
        devices=devices,
        nodes=min(nodes, devices),
        sharding="none" if devices == 1 or parallelism == "single" else parallelism,
        reduced=numerics.compute,
    )


def step_seconds(run: Run, hardware: Hardware, *, cores: int = 1) -> float:
    """Of one optimizer step. `cores`: of a CPU."""
    return terms(ideal(run, hardware, cores=1 if hardware.gpu else max(1, cores))).total


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What of the time depends on the hardware alone, so that it is worked out once for many jobs alike."""

    step_s: float
    evaluated_s: float
    """For a token that is only looked at, with all devices."""
    spread: float
    evidence: str
    trained: int
    parameters: int
    runs: int = 0
    """Own ones that it was corrected by."""


def timing(run: Run, hardware: Hardware, *, cores: int = 1) -> Timing:
    """Of the workload that `run` is a step of. `cores`: of a CPU."""
    cores = 1 if hardware.gpu else max(1, cores)
    # Forward passes: one product of two or three, one part of attention's 3.5, a pass of three; with a reference two.
    alone = replace(run, micro_batches=1.0, recompute="none", devices=1, nodes=1, sharding="none")
    once = terms(ideal(alone, hardware, cores=cores))
    more, trains = int(run.reference), 3 if run.numerics.full else 2
    products, scores = once.matmul / (trains + more), once.attention / (3.5 + more)
    forward = (products + scores + (once.elementwise + once.host) / (3 + more)) * (1 + more)
    spread, evidence = spread_of(run, hardware)
    return Timing(
        step_s=step_seconds(run, hardware, cores=cores),
        evaluated_s=forward / run.tokens / run.devices,
        spread=spread,
        evidence=evidence,
        trained=run.trained,
        parameters=run.shape.parameters,
    )


def observed_runs(runs: int) -> str:
    """So many, in words."""
    return f"{runs} observed run{'' if runs == 1 else 's'}"


def corrected(at: Timing, known: Belief) -> Timing:
    """By what own runs on such hardware have shown; both the time and its interval."""
    if not known.runs:
        return at
    slower, spread = exp(-known.shift), at.spread**known.scale
    moved = f"{100 * expm1(known.shift):+.0f} % tokens/s by {observed_runs(known.runs)} on such hardware"
    return replace(
        at,
        step_s=at.step_s * slower,
        evaluated_s=at.evaluated_s * slower,
        spread=spread,
        evidence=f"{at.evidence}; {moved}, so within / and x {spread:.2f}",
        runs=known.runs,
    )


def pace(workload: Workload, at: Timing, *, local: bool = False) -> Pace:
    """Time of the whole workload. `local`: the weights lie on this machine."""
    states, fetched = at.trained * STATE_BYTES, WEIGHT_BYTES * at.parameters + workload.data_bytes
    training, evaluation = (
        workload.steps * at.step_s,
        workload.eval_rows * workload.sequences * workload.tokens_per_row * at.evaluated_s,
    )
    rate = READ_BYTES_PER_S if local else DOWNLOAD_BYTES_PER_S
    return Pace(
        step_s=at.step_s,
        work_s=training + evaluation,
        stall_s=states / SNAPSHOT_BYTES_PER_S,
        training_s=training,
        evaluation_s=evaluation,
        load_s=START_S + fetched / rate,
        spread=at.spread,
        checkpoint_bytes=states,
        fetched_bytes=fetched,
        evidence=at.evidence,
        runs=at.runs,
    )

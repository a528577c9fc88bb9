"""Time of a workload on one machine: the roofline's terms for the trainer's own step, and their margin of error."""

from dataclasses import dataclass, replace
from math import exp, expm1

from broker.domain.workload import DIVIDED, ModelShape, Parallelism, SpeedTier, Workload
from broker.estimator.architecture.families import family_spec
from broker.estimator.architecture.model_states import trained_parameters
from broker.estimator.memory.job_memory import gathered, numerics_of
from broker.estimator.speed.calibration import (
    COMPARED,
    FITTED,
    SPREAD_COUNTED,
    SPREAD_CPU,
    SPREAD_MEASURED,
    SPREAD_MIXTURE,
    SPREAD_OTHER_CODE,
    SPREAD_OTHER_CODE_FAR,
    SPREAD_UNMEASURED,
    Belief,
)
from broker.estimator.speed.hardware import Hardware
from broker.estimator.speed.roofline import LAYER_LAUNCH_S, Ideal, RooflineStep, ideal, terms

SNAPSHOT_BYTES_PER_S = 2e9
"""Rate from device to host memory [assumed]: the part of a save that the training loop waits for."""
DOWNLOAD_BYTES_PER_S, READ_BYTES_PER_S = 200e6, 1e9
"""Rates of weights from the Hub, and from a disk of this machine [assumed]."""
WEIGHT_BYTES = 2
"""Bytes of a parameter on the Hub."""
STATE_BYTES = {"adamw_8bit": 6, "adafactor": 5, "sgd": 4}
"""Bytes of a trained parameter in a checkpoint, with the optimizer's moments; other optimizers are AdamW variants.
Adafactor's sums of rows and columns are less than a byte.
"""
ADAMW_BYTES = 12
UNHIDDEN = 0.25
"""Share of the shorter of launching and computing that does not overlap with the longer one. Chosen by five kinds of
steps on one H100 (`benchmarks.gpu_exact`).
"""
START_S = 15.0
"""Seconds of imports, model construction and the first compilation of kernels [assumed]."""


@dataclass(frozen=True, kw_only=True)
class WorkloadTiming:
    """Times in seconds; P50 unless named otherwise. `spread`: P90 / P50 of the work."""

    step_s: float
    work_s: float
    """Steps and evaluations."""
    stall_s: float
    """Time that training pauses for one checkpoint."""
    training_s: float
    evaluation_s: float
    load_s: float
    """Time from the agent's first heartbeat to the first step."""
    spread: float
    checkpoint_bytes: int
    """Bytes of the trained weights and the optimizer's moments."""
    fetched_bytes: int
    """Bytes of the model's weights and the data set."""
    evidence: str = ""
    """Basis of the speed, in words."""
    tier: SpeedTier = "unchecked"
    runs: int = 0
    """Number of own runs on such hardware that the speed rests on."""


Basis = tuple[float, SpeedTier, str, str]
"""(factor, tier, basis in words, source of the factor). tokens/s are between the estimate divided by the factor and
multiplied by it; see `calibration`.
"""
_ASSUMED = "interval [assumed]"
_WORST = "interval as wide as the worst of 237 runs, by fits without their architecture"
OTHER_CODE = "90 % interval for the code of an unseen laboratory"
NEAREST, FAR = "nearest evidence: this GPU and family", "nearest evidence: other runs"


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Speed of one step on all devices together.

    tokens/s are between `tokens_per_s` / `spread` and `tokens_per_s` x `spread`.
    """

    step_s: float
    tokens_per_s: float
    spread: float
    tier: SpeedTier
    evidence: str
    near: bool = False
    """True if runs of this family on this GPU were fitted."""

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper end of `tokens_per_s`."""
        return self.tokens_per_s / self.spread, self.tokens_per_s * self.spread


def _uncompared(run: RooflineStep, hardware: Hardware) -> Basis | None:
    """Return the basis of an estimate by counted operations, without any similar measured run; None: one exists."""
    if not hardware.gpu:
        return SPREAD_CPU, "unchecked", "one core's rate, by one measurement on two cores", _ASSUMED
    if run.numerics.bits == 8:
        what = "no run on an 8-bit base was measured, and its kernels are not counted"
        return SPREAD_COUNTED, "unchecked", what, _ASSUMED
    shape = run.shape
    if not shape.known:
        what = f"architecture {shape.family!r} is unknown and was estimated as a llama"
        return SPREAD_COUNTED, "unchecked", what, _ASSUMED
    if shape.labels or shape.decoder_layers:
        head = "an encoder" if family_spec(shape).encoder else "a decoder with such a head"
        what = "an encoder-decoder" if shape.decoder_layers else head
        return SPREAD_COUNTED, "unchecked", f"operations of {what} counted, none was measured", _ASSUMED
    if shape.family in COMPARED:
        return None
    what = f"operations counted, no run of {shape.family} was measured"
    if shape.experts:
        return SPREAD_COUNTED, "unchecked", what, _ASSUMED
    return SPREAD_UNMEASURED, "unchecked", what, _WORST


def _is_several(run: RooflineStep) -> bool:
    """Return whether the devices divide the work in a way that no fitted run did."""
    return run.sharding in ("ddp", "hybrid") or (run.nodes > 1 and not run.numerics.full)


def _is_near(run: RooflineStep, hardware: Hardware) -> bool:
    """Return whether runs of this family on this GPU were fitted, or of a mixture judged by rows of that GPU."""
    compared = hardware.name in FITTED.matmul and _uncompared(run, hardware) is None
    return compared and not _is_several(run) and not run.reference


def _spread_of(run: RooflineStep, hardware: Hardware) -> Basis:
    if (uncompared := _uncompared(run, hardware)) is not None:
        return uncompared
    gpu, fitted = hardware.name, hardware.name in FITTED.matmul
    several = _is_several(run)
    if run.shape.experts:
        if fitted and not several:
            what = "only active experts are counted"
            return SPREAD_MIXTURE, "transferred", what, "interval as wide as the worst of 10 runs of Mixtral"
        return SPREAD_COUNTED, "transferred", f"no run of a mixture of experts on the {gpu}", _ASSUMED
    if not fitted:
        return (
            SPREAD_UNMEASURED,
            "transferred",
            f"no measurements on {gpu.upper()}; extrapolated from other GPUs",
            _WORST,
        )
    if several or run.reference:
        what = run.sharding.upper() if several else "a reference"
        what += f" over {run.nodes} machines" if several and run.nodes > 1 else ""
        return SPREAD_UNMEASURED, "transferred", f"fitted on runs on the {gpu}, none with {what}", _WORST
    return (
        SPREAD_MEASURED,
        "transferred",
        f"fitted on runs on the {gpu}",
        "90 % interval, which held 90 % of runs of unseen groups",
    )


def speed(run: RooflineStep, hardware: Hardware, *, cores: int = 1) -> Speed:
    """Return the speed of a step. All speeds that users see come from this function.

    `cores`: number of cores of a CPU.

    The time to launch a layer was measured on the host of one H100. If a step on a host that is twice as slow would be
    outside the interval, the interval is widened to include that step.
    """
    at_best = ideal(run, hardware, cores=1 if hardware.gpu else max(1, cores))
    step_terms, slow_host_s = terms(at_best), _slow_host_s(at_best)
    step_s, (spread, tier, what, interval_source) = step_terms.total, _spread_of(run, hardware)
    if step_terms.host > 0 or slow_host_s > spread * step_s:
        spread, tier, interval_source = (
            max(spread, slow_host_s / step_s),
            "unchecked",
            "interval for a host twice as slow",
        )
        what += (
            f"; the host takes about as long to launch as the GPU to compute, by {1e3 * LAYER_LAUNCH_S:g} ms a layer "
            "and pass"
        )
    tokens = (run.tokens + run.target_tokens) * run.micro_batches * run.devices
    return Speed(
        step_s=step_s, tokens_per_s=tokens / step_s, spread=spread, tier=tier, evidence=f"{what}; {interval_source}",
        near=_is_near(run, hardware),
    )  # fmt: skip


def for_other_code(at: Speed) -> Speed:
    """Return the speed with the interval for the code of a laboratory that no fit has used.

    A wider interval of the speed itself is kept.
    """
    width = SPREAD_OTHER_CODE if at.near else SPREAD_OTHER_CODE_FAR
    if at.spread >= width:
        return at
    what = at.evidence.rsplit("; ", 1)[0]
    return replace(at, spread=width, evidence=f"{what}; {NEAREST if at.near else FAR}; {OTHER_CODE}")


def _slow_host_s(at_best: Ideal) -> float:
    """Return the seconds of the step on a host that takes twice as long to launch it."""
    slow = replace(at_best, launched=2 * at_best.launched)
    slow_terms = terms(slow)
    computing = slow_terms.matmul + slow_terms.attention + slow_terms.elementwise
    return slow_terms.total + UNHIDDEN * min(slow.launched, computing)


def run_of(
    workload: Workload,
    shape: ModelShape,
    hardware: Hardware,
    *,
    devices: int = 1,
    nodes: int = 1,
    parallelism: Parallelism = "ddp",
) -> RooflineStep:
    """Return one step of the trainer on one of `devices`, which are on `nodes` machines together."""
    numerics = numerics_of(workload, shape, bf16=hardware.bf16, gpu=hardware.gpu)
    if devices > 1 and parallelism in DIVIDED:
        numerics = gathered(numerics)
    return RooflineStep(
        shape=shape,
        numerics=numerics,
        tokens=workload.micro_batch * workload.sequences * workload.tokens_per_row,
        length=workload.tokens_per_row,
        target_tokens=workload.micro_batch * workload.target_tokens_per_row,
        target_length=workload.target_tokens_per_row,
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


def step_seconds(run: RooflineStep, hardware: Hardware, *, cores: int = 1) -> float:
    """Return the seconds of one optimizer step. `cores`: of a CPU."""
    return terms(ideal(run, hardware, cores=1 if hardware.gpu else max(1, cores))).total


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Times that depend on the hardware only, so that they are computed once for many equal jobs."""

    step_s: float
    evaluated_s: float
    """Seconds per evaluated token, with all devices."""
    spread: float
    tier: SpeedTier
    evidence: str
    trained: int
    parameters: int
    runs: int = 0
    """Number of own runs that corrected it."""


def timing(run: RooflineStep, hardware: Hardware, *, cores: int = 1) -> Timing:
    """Return the timing of the workload that `run` is a step of. `cores`: of a CPU."""
    cores = 1 if hardware.gpu else max(1, cores)
    # Share of the forward pass: one of two or three products, 1 of attention's 3.5, one of three passes. A reference
    # adds one forward pass to each.
    alone = replace(run, micro_batches=1.0, recompute="none", devices=1, nodes=1, sharding="none")
    once = terms(ideal(alone, hardware, cores=cores))
    more, trains = run.reference, 3 if run.numerics.full else 2
    products, scores = once.matmul / (trains + more), once.attention / (3.5 + more)
    forward = (products + scores + (once.elementwise + once.host) / (3 + more)) * (1 + more)
    at = speed(run, hardware, cores=cores)
    return Timing(
        step_s=at.step_s,
        evaluated_s=forward / run.tokens / run.devices,
        spread=at.spread,
        tier=at.tier,
        evidence=at.evidence,
        trained=run.trained,
        parameters=run.shape.parameters,
    )


def observed_runs(runs: int) -> str:
    """Return the number of runs in words."""
    return f"{runs} observed run{'' if runs == 1 else 's'}"


def corrected(at: Timing, belief: Belief) -> Timing:
    """Correct the time and its interval by own runs on such hardware."""
    if not belief.runs:
        return at
    slower, spread = exp(-belief.shift), at.spread**belief.scale
    moved = f"{100 * expm1(belief.shift):+.0f} % tokens/s by {observed_runs(belief.runs)} on such hardware"
    return replace(
        at,
        step_s=at.step_s * slower,
        evaluated_s=at.evaluated_s * slower,
        spread=spread,
        tier="measured" if belief.alike else at.tier,
        evidence=f"{at.evidence}; {moved}, so within / and x {spread:.2f}",
        runs=belief.runs,
    )


def pace(workload: Workload, at: Timing, *, local: bool = False) -> WorkloadTiming:
    """Return the time of the whole workload. `local`: the weights are on this machine."""
    states = at.trained * STATE_BYTES.get(workload.optimizer, ADAMW_BYTES)
    fetched = WEIGHT_BYTES * at.parameters + workload.data_bytes
    training, evaluation = (
        workload.steps * at.step_s,
        workload.eval_rows * workload.sequences * workload.tokens_per_row * at.evaluated_s,
    )
    rate = READ_BYTES_PER_S if local else DOWNLOAD_BYTES_PER_S
    return WorkloadTiming(
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
        tier=at.tier,
        runs=at.runs,
    )

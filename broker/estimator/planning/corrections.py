"""Corrections of speed and memory estimates, learned from own runs.

Observations are stored raw and compared with the current estimate, so a better estimator makes none of them stale. All
teams of an installation share them as logarithms of observed over estimated by GPU, method and family. These reveal no
team's model, data or names.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, expm1, log, log1p
from statistics import median

from broker.domain.job import Attempt, Job, Reason
from broker.domain.workload import MemoryNeed, RunObservation, SpeedTier, Workload
from broker.estimator.memory.evidence import MAX_FACTOR, shortfall
from broker.estimator.planning.plan_search import Planner, shards_of
from broker.estimator.preemption_rate import History
from broker.estimator.speed.calibration import CPU_PRIOR, GPU_PRIOR, NO_RUNS, Belief, Evidence, Path, Prior, weigh
from broker.estimator.speed.hardware import TABLE, Hardware
from broker.estimator.speed.roofline import ideal
from broker.estimator.speed.throughput import observed_runs, step_seconds
from broker.estimator.spot_hazards import Market, Timeline

ENOUGH_STEPS = 10
"""Minimum steps of a usable speed observation. The first steps of an attempt compile, warm up and fill caches."""
MIN_CORRECTION = 0.8
"""Lowest correction factor of memory [assumed]: the estimate is for the longest row, and observed rows may be shorter.
"""
MIN_MARGIN = 0.01
Z95 = 1.645
"""Standard deviations that a margin represents."""

Kind = tuple[object, ...]
MemoryKey = tuple[Kind, int, int]
"""(model, method and checkpointing; micro-batch, tokens of a row)."""


def memory_key(workload: Workload) -> MemoryKey:
    """Return a key that is equal for workloads that need the same memory."""
    kind = (*model_key(workload), workload.gradient_checkpointing)
    return kind, workload.micro_batch, workload.sequence


def model_key(workload: Workload) -> Kind:
    shape = workload.shape and replace(workload.shape, name="", bundled=False)
    lora = workload.lora_r, workload.lora_targets
    how = workload.optimizer, workload.attention
    return shape, workload.method, *lora, workload.precision, workload.sequences, *how


@dataclass(frozen=True, kw_only=True, eq=False)
class Corrections:
    """Logarithms of observed over estimated, by the group they belong to."""

    speeds: Mapping[str, Sequence[tuple[Path, float]]] = field(default_factory=dict)
    """Speed observations by hardware name."""
    peaks: Sequence[tuple[Path, float]] = ()
    """Peak memory observations, one for all runs with the same key, because repeated runs add no evidence for others.
    """
    floors: Mapping[Kind, Sequence[tuple[int, int, int]]] = field(default_factory=dict)
    """Values by model, method and checkpointing: (micro-batch, tokens of a row, highest observed bytes of a device)."""
    shortfalls: Mapping[Kind, float] = field(default_factory=dict)
    """Factor by which out-of-memory runs exceeded the estimate plus margin, by model and method."""
    spots: History = field(default_factory=dict)
    """Hours and preemptions of own spot machines, by cloud, region and GPU."""
    markets: Mapping[Market, Timeline] = field(default_factory=dict)
    """Times at which spot markets became available or unavailable."""
    records: Mapping[tuple[SpeedTier, bool], str] = field(default_factory=dict)
    """Record of each tier of evidence in words, for simulated offers (True) and for rented ones."""
    _weighed: dict[object, Evidence | None] = field(default_factory=dict, repr=False)

    def speed(self, hardware: Hardware, workload: Workload) -> Belief:
        """Return the correction of tokens/s."""
        path, runs = _path(hardware.name, workload), self.speeds.get(hardware.name, ())
        return self._believed(runs, path, GPU_PRIOR if hardware.gpu else CPU_PRIOR)

    def with_record(self, evidence: str, tier: SpeedTier, *, simulated: bool) -> str:
        """Return the evidence of a speed with the record of its tier, where finished jobs have one."""
        record = self.records.get((tier, simulated))
        return f"{evidence}; {record}" if record else evidence

    def prepare(self, name: str) -> None:
        """Weigh the observations of one kind of hardware now, so that quotes need not; 0.1 s for some hundred runs."""
        self._evidence(self.speeds[name], name, GPU_PRIOR if TABLE[name].gpu else CPU_PRIOR)

    def _believed(self, runs: Sequence[tuple[Path, float]], path: Path, prior: Prior) -> Belief:
        evidence = self._evidence(runs, path[0], prior)
        return evidence.of(path) if evidence else NO_RUNS

    def _evidence(self, runs: Sequence[tuple[Path, float]], first: str, prior: Prior) -> Evidence | None:
        if (first, prior) not in self._weighed:
            close_runs = [(where, y) for where, y in runs if where[0] == first]
            self._weighed[first, prior] = weigh(close_runs, prior) if close_runs else None
        return self._weighed[first, prior]

    def need(self, workload: Workload, need: MemoryNeed, gpu: bool, sharded: bool) -> MemoryNeed:
        """Return the corrected estimate, with a margin that follows the evidence.

        The floor is the highest observed memory of runs with at most this micro-batch and at most this row length.
        Sharded models have no observations.
        """
        if sharded:
            return replace(need, correction=workload.memory_factor)
        path = _path("gpu" if gpu else "cpu", workload)
        belief = self._believed(self.peaks, path, _memory_prior(need.margin))
        failed = max(workload.memory_factor, self.shortfalls.get(model_key(workload), 1.0))
        factor, source = min(MAX_FACTOR, max(MIN_CORRECTION, exp(belief.shift))), need.source
        margin = expm1(log1p(need.margin) * min(1.0, belief.scale))
        if belief.runs:
            source += f"; {100 * expm1(belief.shift):+.0f} % by {observed_runs(belief.runs)}"
        if failed > 1:  # after such a failure the margin stays wide, even if other runs succeeded
            factor, margin = max(factor, failed), need.margin
            source += "; such a run has run out of memory"
        floors = self.floors.get(memory_key(workload)[0], ())
        lower_bounds = (
            observed_bytes for b, s, observed_bytes in floors if b <= workload.micro_batch and s <= workload.sequence
        )
        floor = max(lower_bounds, default=0)
        return replace(need, correction=factor, floor=floor, margin=margin, runs=belief.runs, source=source)


NO_CORRECTIONS = Corrections()
LearnedCorrections = Callable[[], Corrections]
"""Returns the current corrections."""


def _path(where: str, workload: Workload) -> Path:
    """Return the group of a run. The task is part of it, because runs of one task are weak evidence for another."""
    family = workload.shape.family if workload.shape else ""
    return where, workload.method, family if workload.task == "causal_lm" else f"{family} {workload.task}"


def _memory_prior(margin: float) -> Prior:
    """Convert a margin to the deviations that it represents; the method and the family have the largest share."""
    deviation = log1p(max(margin, MIN_MARGIN)) / Z95
    return Prior(levels=(0.3 * deviation, 0.6 * deviation, 0.6 * deviation), run=0.43 * deviation)


# -------------------------------------------------------------------------------------------------------- observations


def observed(job: Job, attempt: Attempt) -> RunObservation | None:
    """Return the observation of an ended attempt, or None if it has nothing that an estimate could learn from."""
    offer, workload, plan, final = attempt.line.offer, job.workload, attempt.line.plan, attempt.final
    name = offer.emulated_on or offer.accelerator
    if workload.shape is None or plan is None or name not in TABLE:
        return None
    last = final or attempt.beat
    if last is None:
        return None
    resumed = last.resumed_from or 0
    # The host that emulates a GPU has its own memory, not the GPU's.
    emulated = bool(offer.emulated_on)
    is_device_oom = attempt.reason is Reason.OOM and not emulated and not attempt.ran_out_of_host
    timed = last.step - resumed >= ENOUGH_STEPS and last.tokens_per_s
    peak = last.peak_memory_bytes if last.step > resumed and not emulated else None
    if not (timed or is_device_oom or peak):
        return None
    return RunObservation(
        attempt_id=attempt.id,
        hardware=name,
        plan=plan,
        nodes=attempt.line.nodes,
        cores=offer.emulated_vcpus or offer.vcpus,
        workload=replace(workload, shape=replace(workload.shape, name="")),
        tokens_per_s=last.tokens_per_s if timed else None,
        peak_bytes=peak,
        device_bytes=0 if emulated else offer.gpu_memory_bytes,
        out_of_memory=is_device_oom,
    )


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """An observation with the current estimate of the same run."""

    hardware: str
    path: Path
    speed: float | None
    """Logarithm of observed over estimated tokens/s; None: unknown or implausible."""
    memory_key: MemoryKey
    model_key: Kind
    memory_path: Path
    peak: float | None = None
    """Logarithm of observed over estimated peak memory; None: unknown."""
    device_bytes_used: int | None = None
    """Observed bytes of the device; None: unknown."""
    shortfall: float | None = None
    """Factor to multiply the estimate by, if the run ran out of memory; None: it did not."""
    device_bytes: int = 0


def assess(observation: RunObservation) -> ComparedRun | None:
    """Compare the observation with the current estimate; takes 2 ms. Return None if it can no longer be estimated."""
    hardware = TABLE.get(observation.hardware)
    if hardware is None or observation.workload.shape is None:
        return None
    planner = Planner(observation.workload)
    work = planner.as_planned(observation.plan)
    compared = ComparedRun(
        hardware=hardware.name,
        path=_path(hardware.name, work),
        speed=_speed(observation, planner, hardware),
        memory_key=memory_key(work),
        model_key=model_key(work),
        memory_path=_path("gpu" if hardware.gpu else "cpu", work),
        device_bytes=observation.device_bytes,
    )
    if shards_of(observation.plan, observation.nodes) > 1:
        return compared
    need = planner.need(observation.plan, hardware, observation.nodes)
    if observation.out_of_memory:
        return replace(compared, shortfall=shortfall(observation.device_bytes, need))
    if observation.peak_bytes is None or not 0 < observation.peak_bytes <= observation.device_bytes:
        return compared
    outside = 0 if hardware.gpu else need.context  # a process on a CPU is its own context
    device_bytes_used = observation.peak_bytes + (need.context if hardware.gpu else 0)
    peak = log((observation.peak_bytes - outside) / need.peak) if observation.peak_bytes > outside else None
    return replace(compared, device_bytes_used=device_bytes_used, peak=peak)


def learn(assessed: Sequence[ComparedRun]) -> Corrections:
    """Return the corrections that follow from the runs. `assessed`: oldest first."""
    speeds: dict[str, list[tuple[Path, float]]] = defaultdict(list)
    peaks: dict[tuple[Path, MemoryKey], list[float]] = defaultdict(list)
    floors: dict[MemoryKey, int] = {}
    ran_out: dict[MemoryKey, ComparedRun] = {}
    for run in assessed:
        if run.speed is not None:
            speeds[run.hardware].append((run.path, run.speed))
        if run.peak is not None:
            peaks[run.memory_path, run.memory_key].append(run.peak)
        if run.device_bytes_used is not None:
            floors[run.memory_key] = max(floors.get(run.memory_key, 0), run.device_bytes_used)
            if run.memory_key in ran_out and run.device_bytes <= ran_out[run.memory_key].device_bytes:
                del ran_out[run.memory_key]  # the run fits on that device; another process had filled the memory
        if run.shortfall is not None:
            ran_out[run.memory_key] = run
    shortfalls: dict[Kind, float] = {}
    for run in ran_out.values():
        shortfalls[run.model_key] = max(run.shortfall or 1.0, shortfalls.get(run.model_key, 1.0))
    by_kind: dict[Kind, list[tuple[int, int, int]]] = defaultdict(list)
    for (kind, rows, length), used in floors.items():
        by_kind[kind].append((rows, length, used))
    return Corrections(
        speeds=dict(speeds),
        peaks=[(path, median(logs)) for (path, _), logs in peaks.items()],
        floors=by_kind,
        shortfalls=shortfalls,
    )


def _speed(observation: RunObservation, planner: Planner, hardware: Hardware) -> float | None:
    """Return the logarithm of observed over estimated tokens/s; None: unknown, or faster than the datasheet."""
    if observation.tokens_per_s is None or observation.tokens_per_s <= 0:
        return None
    run = planner.run(observation.plan, hardware, observation.nodes)
    observed_s = observation.workload.global_batch * observation.workload.counted_per_row / observation.tokens_per_s
    fastest_s = ideal(run, hardware).matmul * hardware.matmul_flops / hardware.bf16_flops if hardware.gpu else 0.0
    return None if observed_s < fastest_s else log(step_seconds(run, hardware, cores=observation.cores) / observed_s)

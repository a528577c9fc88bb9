"""What own runs say of speed and memory: observations in, corrections of later estimates out.

Observations are kept raw and compared with the estimate of today, so a better estimator makes none of them stale. They
are shared by all teams of an installation: by logarithms of observed over estimated, of a GPU, method and family, in
which nobody's model, data or name can be seen.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, expm1, log, log1p
from statistics import median

from broker.domain.job import Attempt, Job, Reason
from broker.domain.observation import RunObservation
from broker.domain.workload import MemoryNeed, Workload
from broker.estimator.memory.shortfall import MOST, shortfall
from broker.estimator.planning.plan_search import Planner, shards_of
from broker.estimator.preemption_rate import History
from broker.estimator.speed.calibration import CPU_PRIOR, GPU_PRIOR, NO_RUNS, Belief, Evidence, Path, Prior, weigh
from broker.estimator.speed.hardware import TABLE, Hardware
from broker.estimator.speed.roofline import ideal
from broker.estimator.speed.throughput import observed_runs, step_seconds

ENOUGH_STEPS = 10
"""The first steps of an attempt compile, warm up and fill caches."""
LEAST = 0.8
"""Memory is corrected to no less, since the estimate is of the longest row, and other data has other rows [assumed]."""
LEAST_MARGIN = 0.01
Z95 = 1.645
"""Standard deviations that a margin stands for."""

Kind = tuple[object, ...]
Like = tuple[Kind, int, int]
"""(model, method and checkpointing; micro-batch, tokens of a row)."""


def memory_key(workload: Workload) -> Like:
    """Equal for workloads that need the same memory."""
    kind = (*model_key(workload), workload.gradient_checkpointing)
    return kind, workload.micro_batch, workload.sequence


def model_key(workload: Workload) -> Kind:
    shape = workload.shape and replace(workload.shape, name="", bundled=False)
    lora = workload.lora_r, workload.lora_targets
    how = workload.optimizer, workload.attention
    return shape, workload.method, *lora, workload.precision, workload.sequences, *how


@dataclass(frozen=True, kw_only=True, eq=False)
class Corrections:
    """Logarithms of observed over estimated, by where they belong."""

    speeds: Mapping[str, Sequence[tuple[Path, float]]] = field(default_factory=dict)
    """By hardware."""
    peaks: Sequence[tuple[Path, float]] = ()
    """One for all runs that are alike: they say nothing more of others."""
    floors: Mapping[Kind, Sequence[tuple[int, int, int]]] = field(default_factory=dict)
    """By model, method and checkpointing: (micro-batch, tokens of a row, most bytes of a device that were seen)."""
    shortfalls: Mapping[Kind, float] = field(default_factory=dict)
    """By how much runs of this model and method wanted more than was estimated, with its margin, as they ran out."""
    spots: History = field(default_factory=dict)
    """Own spot machines' time and preemptions, by cloud, region and GPU."""
    _weighed: dict[object, Evidence | None] = field(default_factory=dict, repr=False)

    def speed(self, hardware: Hardware, workload: Workload) -> Belief:
        """Of tokens/s."""
        path, runs = _path(hardware.name, workload), self.speeds.get(hardware.name, ())
        return self._believed(runs, path, GPU_PRIOR if hardware.gpu else CPU_PRIOR)

    def prepare(self, name: str) -> None:
        """Weighs what was seen of one hardware now, so that no quote has to: 0.1 s for some hundred runs."""
        self._evidence(self.speeds[name], name, GPU_PRIOR if TABLE[name].gpu else CPU_PRIOR)

    def _believed(self, runs: Sequence[tuple[Path, float]], path: Path, prior: Prior) -> Belief:
        found = self._evidence(runs, path[0], prior)
        return found.of(path) if found else NO_RUNS

    def _evidence(self, runs: Sequence[tuple[Path, float]], first: str, prior: Prior) -> Evidence | None:
        if (first, prior) not in self._weighed:
            near = [(where, y) for where, y in runs if where[0] == first]
            self._weighed[first, prior] = weigh(near, prior) if near else None
        return self._weighed[first, prior]

    def need(self, workload: Workload, need: MemoryNeed, gpu: bool, sharded: bool) -> MemoryNeed:
        """An estimate corrected, its margin by the evidence: never less than what was seen with no more rows, and no
        longer ones. Of what is divided between GPUs nothing was observed.
        """
        if sharded:
            return replace(need, correction=workload.memory_factor)
        path = _path("gpu" if gpu else "cpu", workload)
        known = self._believed(self.peaks, path, _memory_prior(need.margin))
        failed = max(workload.memory_factor, self.shortfalls.get(model_key(workload), 1.0))
        factor, source = min(MOST, max(LEAST, exp(known.shift))), need.source
        margin = expm1(log1p(need.margin) * min(1.0, known.scale))
        if known.runs:
            source += f"; {100 * expm1(known.shift):+.0f} % by {observed_runs(known.runs)}"
        if failed > 1:  # where such a run has failed, others' success is no reason to be less careful
            factor, margin = max(factor, failed), need.margin
            source += "; such a run has run out of memory"
        seen = self.floors.get(memory_key(workload)[0], ())
        least = (took for b, s, took in seen if b <= workload.micro_batch and s <= workload.sequence)
        floor = max(least, default=0)
        return replace(need, correction=factor, floor=floor, margin=margin, runs=known.runs, source=source)


NO_CORRECTIONS = Corrections()
LearnedCorrections = Callable[[], Corrections]
"""What is known now."""


def _path(where: str, workload: Workload) -> Path:
    """A family's runs of one task tell little of another's."""
    family = workload.shape.family if workload.shape else ""
    return where, workload.method, family if workload.task == "causal_lm" else f"{family} {workload.task}"


def _memory_prior(margin: float) -> Prior:
    """A margin as the deviations that it stands for: most of it is the method's and the family's."""
    deviation = log1p(max(margin, LEAST_MARGIN)) / Z95
    return Prior(levels=(0.3 * deviation, 0.6 * deviation, 0.6 * deviation), run=0.43 * deviation)


# -------------------------------------------------------------------------------------------------------- observations


def observed(job: Job, attempt: Attempt) -> RunObservation | None:
    """What an ended attempt showed; None: nothing that an estimate could learn from."""
    offer, workload, plan, final = attempt.line.offer, job.workload, attempt.line.plan, attempt.final
    name = offer.emulated_on or offer.accelerator
    if workload.shape is None or plan is None or name not in TABLE:
        return None
    last = final or attempt.beat
    if last is None:
        return None
    resumed = last.resumed_from or 0
    # What stands for a GPU here has this computer's memory, not the GPU's.
    emulated = bool(offer.emulated_on)
    short = attempt.reason is Reason.OOM and not emulated and not attempt.ran_out_of_host
    timed = last.step - resumed >= ENOUGH_STEPS and last.tokens_per_s
    peak = last.peak_memory_bytes if last.step > resumed and not emulated else None
    if not (timed or short or peak):
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
        out_of_memory=short,
    )


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """An observation beside the estimate of today."""

    hardware: str
    path: Path
    speed: float | None
    """Logarithm of observed over estimated; None: not known, or not to be believed."""
    like: Like
    base: Kind
    memory_path: Path
    peak: float | None = None
    """Likewise."""
    took: int | None = None
    """Bytes of the device."""
    short: float | None = None
    """What the estimate is to be multiplied by, where it ran out of memory."""
    device_bytes: int = 0


def assess(one: RunObservation) -> ComparedRun | None:
    """None: what cannot be estimated any more. Takes 2 ms."""
    hardware = TABLE.get(one.hardware)
    if hardware is None or one.workload.shape is None:
        return None
    planner = Planner(one.workload)
    work = planner.as_planned(one.plan)
    found = ComparedRun(
        hardware=hardware.name,
        path=_path(hardware.name, work),
        speed=_speed(one, planner, hardware),
        like=memory_key(work),
        base=model_key(work),
        memory_path=_path("gpu" if hardware.gpu else "cpu", work),
        device_bytes=one.device_bytes,
    )
    if shards_of(one.plan, one.nodes) > 1:
        return found
    need = planner.need(one.plan, hardware, one.nodes)
    if one.out_of_memory:
        return replace(found, short=shortfall(one.device_bytes, need))
    if one.peak_bytes is None or not 0 < one.peak_bytes <= one.device_bytes:
        return found
    outside = 0 if hardware.gpu else need.context  # a process on a CPU is its own context
    took = one.peak_bytes + (need.context if hardware.gpu else 0)
    peak = log((one.peak_bytes - outside) / need.peak) if one.peak_bytes > outside else None
    return replace(found, took=took, peak=peak)


def learn(assessed: Sequence[ComparedRun]) -> Corrections:
    """`assessed`: the older ones first."""
    speeds: dict[str, list[tuple[Path, float]]] = defaultdict(list)
    peaks: dict[tuple[Path, Like], list[float]] = defaultdict(list)
    floors: dict[Like, int] = {}
    ran_out: dict[Like, ComparedRun] = {}
    for one in assessed:
        if one.speed is not None:
            speeds[one.hardware].append((one.path, one.speed))
        if one.peak is not None:
            peaks[one.memory_path, one.like].append(one.peak)
        if one.took is not None:
            floors[one.like] = max(floors.get(one.like, 0), one.took)
            if one.like in ran_out and one.device_bytes <= ran_out[one.like].device_bytes:
                del ran_out[one.like]  # it does fit there: something else had filled that memory
        if one.short is not None:
            ran_out[one.like] = one
    shortfalls: dict[Kind, float] = {}
    for one in ran_out.values():
        shortfalls[one.base] = max(one.short or 1.0, shortfalls.get(one.base, 1.0))
    by_kind: dict[Kind, list[tuple[int, int, int]]] = defaultdict(list)
    for (kind, rows, length), took in floors.items():
        by_kind[kind].append((rows, length, took))
    return Corrections(
        speeds=dict(speeds),
        peaks=[(path, median(logs)) for (path, _), logs in peaks.items()],
        floors=by_kind,
        shortfalls=shortfalls,
    )


def _speed(one: RunObservation, planner: Planner, hardware: Hardware) -> float | None:
    """Logarithm of observed over estimated tokens/s; None: not known, or faster than the datasheet."""
    if one.tokens_per_s is None or one.tokens_per_s <= 0:
        return None
    run = planner.run(one.plan, hardware, one.nodes)
    took = one.workload.global_batch * one.workload.counted_per_row / one.tokens_per_s
    least = ideal(run, hardware).matmul * hardware.matmul_flops / hardware.bf16_flops if hardware.gpu else 0.0
    return None if took < least else log(step_seconds(run, hardware, cores=one.cores) / took)

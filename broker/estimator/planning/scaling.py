"""Effect of more GPUs: for each count the best plan, its throughput, utilisation, hours and dollars.

Uses the rules of `plan_search`, on machines with eight GPUs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import takewhile
from typing import Literal

from broker.domain.workload import DIVIDED, ModelShape, Parallelism, Plan
from broker.estimator.architecture.model_states import trained_parameters
from broker.estimator.memory import estimate
from broker.estimator.memory.device_overhead import CONTEXT
from broker.estimator.memory.estimate import EstimateOptions, InvalidEstimate
from broker.estimator.memory.job_memory import can_shard
from broker.estimator.planning.plan_search import MAX_ROWS, SPEED_TIE_RATIO, dividers, parallelism_candidates
from broker.estimator.speed.hardware import Hardware
from broker.estimator.speed.roofline import RooflineStep, model_flop
from broker.estimator.speed.throughput import Speed, speed, step_seconds

GPUS_PER_MACHINE = 8
"""GPUs of a machine."""
MAX_GPUS = 16_384
MEMORY_ESTIMATES = 2048
"""Memory estimates that a process keeps, about 3 KB each; a table for 1 to 512 GPUs needs about 110."""
Sharding = Literal["none", "ddp", "fsdp", "hybrid"]
SHARDED: dict[Parallelism, Sharding] = {"single": "none", "ddp": "ddp", "fsdp": "fsdp", "hybrid": "hybrid"}


@dataclass(frozen=True, kw_only=True)
class TrainingLoad:
    """Training whose scaling is estimated.

    `tokens_per_row`: mean tokens; the longest row has the length of the options. `target_tokens_per_row`: mean tokens
    of a row that an encoder-decoder generates.
    """

    global_batch: int
    tokens_per_row: float
    steps: int
    target_tokens_per_row: float = 0.0
    usd_per_gpu_hour: float | None = None


@dataclass(frozen=True, kw_only=True)
class Point:
    """Result for one number of GPUs; `plan` is None if nothing fits."""

    gpus: int
    nodes: int
    """Machines that the plan's GPUs are on."""
    need_bytes: int
    """Bytes of one GPU, with margin and context. If nothing fits, those of the plan that needs least."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of `need_bytes` by category; `margin` is the uncertainty of the estimate."""
    plan: Plan | None = None
    speed: Speed | None = None
    """Speed of the plan."""
    mfu: float = 0.0
    """Model FLOP without recomputation, over the datasheet's bf16 rate of all GPUs."""
    hours: float = 0.0
    """Hours of training only, without interruptions."""
    usd: float | None = None


def unmeasured(ask: EstimateOptions) -> str | None:
    """Return why the time cannot be estimated, or None if it can."""
    if ask.gpus > MAX_GPUS:
        return f"no basis: no measured run had more than 512 GPUs, and the limit is {MAX_GPUS}"
    if ask.offload or ask.sharding == "tensor":
        what = "offload" if ask.offload else "tensor sharding"
        return f"no basis: the time model has no term for {what}"
    if ask.method == "adapter":
        return "no basis: no run of such an adapter was measured, and its kernels are not counted"
    return None


def run_of(
    shape: ModelShape,
    ask: EstimateOptions,
    plan: Plan,
    tokens_per_row: float,
    nodes: int = 1,
    *,
    generated_tokens: float = 0.0,
) -> RooflineStep:
    """Return one step under the plan. `generated_tokens`: tokens of a row that an encoder-decoder generates."""
    variant = replace(ask, gpus=plan.devices, sharding="fsdp" if plan.parallelism in DIVIDED else "none")
    numerics = estimate.numerics(shape, variant)[0]
    return RooflineStep(
        shape=shape,
        numerics=numerics,
        tokens=plan.micro_batch * tokens_per_row,
        length=tokens_per_row,
        target_tokens=plan.micro_batch * generated_tokens,
        target_length=generated_tokens,
        trained=trained_parameters(shape, numerics),
        micro_batches=plan.accumulation,
        recompute=estimate.recompute(ask) if plan.gradient_checkpointing else "none",
        optimizer=ask.optimizer,
        devices=plan.devices,
        nodes=min(nodes, plan.devices),
        sharding=SHARDED[plan.parallelism],
        reduced=numerics.compute,
    )


def utilisation(run: RooflineStep, hardware: Hardware, tokens_per_s: float) -> float:
    """Return the model FLOP utilisation of all devices at that rate."""
    return model_flop(run) * tokens_per_s / (hardware.bf16_flops * run.devices)


def scaling(
    shape: ModelShape,
    ask: EstimateOptions,
    hardware: Hardware,
    counts: Sequence[int],
    load: TrainingLoad,
) -> tuple[Point, ...]:
    """Return a point for each number of GPUs.

    Raise InvalidEstimate for options without a time model.

    Rows, checkpointing, GPUs and sharding of `ask` are ignored; the search chooses them.
    """
    estimate.check(shape, replace(ask, gpus=1, sharding="none"))
    if (why := unmeasured(ask)) is not None:
        raise InvalidEstimate(f"--what-if: {why}")
    scale = _Scale(shape, ask, hardware, load)
    return tuple(scale.point(count) for count in counts)


@lru_cache(maxsize=MEMORY_ESTIMATES)
def _needed(shape: ModelShape, options: EstimateOptions) -> tuple[tuple[str, int], ...]:
    """Return (category, bytes) of one GPU. GPU type, data set and price have no influence, so calls share results."""
    memory = estimate.estimate(shape, options)
    margin = int(memory.peak_allocated * (1 + memory.margin)) - memory.peak_allocated
    return tuple({**memory.by_category, "context": CONTEXT, "margin": margin}.items())


class _Scale:
    def __init__(self, shape: ModelShape, ask: EstimateOptions, hardware: Hardware, load: TrainingLoad) -> None:
        self._shape, self._ask, self._hardware, self._load = shape, ask, hardware, load
        self._fitting: dict[tuple[Parallelism, bool], int] = {}
        """Most rows that fit on the GPUs of the last point, by parallelism and checkpointing."""

    def point(self, gpus: int) -> Point:
        devices = max(d for d in range(1, min(gpus, self._load.global_batch) + 1) if self._load.global_batch % d == 0)
        nodes = -(-devices // GPUS_PER_MACHINE)  # idle GPUs leave whole machines idle
        divided = can_shard(self._shape, self._ask.method, self._ask.optimizer, self._ask.precision)
        candidates: list[tuple[Plan, bool]] = []
        for together in parallelism_candidates(devices, nodes, divided=divided):
            candidates += [
                self._most_rows(layout, devices, nodes, recomputed)
                for layout in together
                for recomputed in (False, True)
            ]
            if any(fits for _, fits in candidates):
                break
        else:
            quickest_plan = min((plan for plan, _ in candidates), key=lambda plan: self._of(plan, nodes))
            memory = self._memory(quickest_plan, nodes)
            return Point(gpus=gpus, nodes=nodes, need_bytes=sum(memory.values()), memory=memory)
        fitting = [plan for plan, fits in candidates if fits]
        times = {plan: self._step_s(plan, nodes) for plan in fitting}
        quickest = min(times.values())
        tied = [plan for plan in fitting if times[plan] <= SPEED_TIE_RATIO * quickest]
        return self._point(gpus, nodes, min(tied, key=lambda plan: (self._of(plan, nodes), times[plan])))

    def _most_rows(self, layout: Parallelism, devices: int, nodes: int, checkpointing: bool) -> tuple[Plan, bool]:
        """Return (plan, fits): the plan with the most rows that fits, otherwise the plan with one row."""
        rows_per_device = self._load.global_batch // devices
        plans = [
            Plan(
                parallelism=layout, devices=devices, micro_batch=rows, accumulation=rows_per_device // rows,
                gradient_checkpointing=checkpointing,
            )
            for rows in dividers(rows_per_device, MAX_ROWS)
        ]  # fmt: skip
        # A GPU among more has at least the memory left, so the rows that fitted before are where the search starts.
        known = [plan for plan in plans if plan.micro_batch <= self._fitting.get((layout, checkpointing), 0)]
        known = [plan for plan in known if self._fits(known[-1], nodes)]
        fitting = [*known, *takewhile(lambda plan: self._fits(plan, nodes), plans[len(known) :])]
        if not fitting:
            return plans[0], False
        self._fitting[layout, checkpointing] = fitting[-1].micro_batch
        return fitting[-1], True

    def _fits(self, plan: Plan, nodes: int) -> bool:
        return self._of(plan, nodes) <= self._hardware.memory_bytes

    def _of(self, plan: Plan, nodes: int) -> int:
        """Return the bytes that one GPU needs."""
        return sum(size for _, size in self._by_category(plan, nodes))

    def _memory(self, plan: Plan, nodes: int) -> Mapping[str, int]:
        """Return the bytes that one GPU needs, by category."""
        return dict(self._by_category(plan, nodes))

    def _by_category(self, plan: Plan, nodes: int) -> tuple[tuple[str, int], ...]:
        # DDP needs the same memory on any number of devices from 2. Only hybrid sharding depends on the machines.
        devices = {"single": 1, "ddp": 2}.get(plan.parallelism, plan.devices)
        machines = nodes if plan.parallelism == "hybrid" else 1
        options = replace(
            self._ask, rows=plan.micro_batch, accumulated=plan.accumulation > 1,
            checkpointing=plan.gradient_checkpointing, gpus=devices, nodes=machines,
            sharding="none" if devices == 1 else SHARDED[plan.parallelism],
        )  # fmt: skip
        return _needed(self._shape, options)

    def _step_s(self, plan: Plan, nodes: int) -> float:
        return step_seconds(self._run(plan, nodes), self._hardware)

    def _run(self, plan: Plan, nodes: int) -> RooflineStep:
        load = self._load
        return run_of(
            self._shape, self._ask, plan, load.tokens_per_row, nodes, generated_tokens=load.target_tokens_per_row
        )

    def _point(self, gpus: int, nodes: int, plan: Plan) -> Point:
        load = self._load
        run = self._run(plan, nodes)
        at = speed(run, self._hardware)
        hours, price = load.steps * at.step_s / 3600, load.usd_per_gpu_hour
        return Point(
            gpus=gpus,
            nodes=nodes,
            need_bytes=self._of(plan, nodes),
            memory=self._memory(plan, nodes),
            plan=plan,
            speed=at,
            mfu=utilisation(run, self._hardware, at.tokens_per_s),
            hours=hours,
            usd=None if price is None else hours * price * gpus,
        )


def counts_of(text: str) -> tuple[int, ...]:
    """Parse `1,2,4,…,512`, with or without `gpus=`; `…` or `...` continues by the last factor.

    Raise ValueError with one line.
    """
    name, _, listed = text.partition("=") if "=" in text else ("gpus", "=", text)
    if name.strip() != "gpus" or not listed.strip():
        raise ValueError(f"--what-if {text}: write 1,2,4,8 or 1,2,...,512")
    counts: list[int] = []
    is_continuing = False
    for word in listed.replace("...", "…").split(","):
        if word.strip() == "…":
            is_continuing = True
            continue
        if not word.strip().isdecimal() or not 1 <= (number := int(word)) <= MAX_GPUS:
            shown_word = word.strip() or "nothing"
            raise ValueError(f"--what-if {text}: {shown_word} is not a number of GPUs from 1 to {MAX_GPUS}")
        while is_continuing and counts and counts[-1] * _factor(counts) < number:
            counts.append(counts[-1] * _factor(counts))
        is_continuing = False
        counts.append(number)
    if is_continuing or counts != sorted(set(counts)):
        raise ValueError(f"--what-if {text}: give ascending numbers, each once, and end with one")
    return tuple(counts)


def _factor(counts: Sequence[int]) -> int:
    return max(2, math.floor(counts[-1] / counts[-2])) if len(counts) > 1 else 2

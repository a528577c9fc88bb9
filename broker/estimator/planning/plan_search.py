"""Search of the best plan of a workload on a machine: parallelism, micro-batch, accumulation, checkpointing.

The user sets the global batch. Among the plans that fit with their margin, the fastest wins. Among plans of nearly
equal speed, the plan that needs least memory wins, because an estimate may be wrong. A model is sharded only if no
single GPU can hold it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from broker.domain.workload import MemoryNeed, Parallelism, Plan, Workload
from broker.estimator.memory.evidence import evidence_of
from broker.estimator.memory.job_memory import GPU_CONTEXT, gathered, may_shard, memory, numerics_of
from broker.estimator.memory.simulator import simulate
from broker.estimator.memory.simulator.types import Step
from broker.estimator.speed.hardware import Hardware
from broker.estimator.speed.roofline import RooflineStep
from broker.estimator.speed.throughput import Timing, run_of, step_seconds, timing
from trainer.contract.documents import Parallelism as ProcessParallelism
from trainer.contract.documents import World

MAX_ROWS = 64
"""Largest micro-batch that is tried; larger ones are no faster."""
MICRO_BATCH_RATIO = 1.5
"""Smallest factor between two micro-batches that are tried."""
SPEED_TIE_RATIO = 1.02
"""Plans whose step times differ by less than this factor count as equally fast; the time model is far less precise."""
SHARDED_MARGIN = {"fsdp": 0.10, "hybrid": 0.15}
"""Minimum share added to the estimate of a sharded plan.

Estimates of FSDP were compared only with the tracer, those of hybrid sharding with nothing.
"""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The best plan, or with `fits` False the plan that needs the least memory."""

    plan: Plan
    fits: bool
    memory: MemoryNeed
    step_s: float


Corrected = Callable[[Workload, MemoryNeed, bool, bool], MemoryNeed]
"""(planned workload, its estimate, on a GPU, sharded) -> the estimate corrected by own runs."""


def _as_estimated(_work: Workload, need: MemoryNeed, _gpu: bool, _sharded: bool) -> MemoryNeed:
    return need


def dividers(rows: int, maximum: int) -> list[int]:
    """Return the micro-batches to try, ascending: divisors of `rows` up to `maximum`.

    `rows`: number of rows that one device trains in one step.
    """
    sizes = [1]
    for size in range(2, min(rows, maximum) + 1):
        if rows % size == 0 and size >= MICRO_BATCH_RATIO * sizes[-1]:
            sizes.append(size)
    return sizes


def devices_of(workload: Workload, device_count: int, nodes: int = 1) -> int:
    """Return the largest usable number of devices, a multiple of `nodes` if possible.

    A number is usable if every device can get the same number of rows in every step.
    """
    units = workload.global_batch if workload.free_micro_batch else workload.global_batch // workload.micro_batch
    even = [d for d in range(1, max(1, min(device_count, units)) + 1) if units % d == 0]
    return max([d for d in even if d % nodes == 0] or even)


def parallelism_candidates(devices: int, nodes: int, *, divided: bool) -> list[list[Parallelism]]:
    """Return groups of parallelisms for `devices` devices, in the order of preference.

    The search stops at the first group with a plan that fits. `divided`: the model may be sharded.
    """
    if devices == 1:
        return [["single"]]
    if not divided:
        return [["ddp"]]
    can_replicate_per_node = nodes > 1 and devices > nodes and devices % nodes == 0  # each machine can hold a copy
    return [["ddp"], ["fsdp", "hybrid"] if can_replicate_per_node else ["fsdp"]]


def shards_of(plan: Plan, nodes: int) -> int:
    """Return the number of devices that share one copy of weights and states."""
    match plan.parallelism:
        case "fsdp":
            return plan.devices
        case "hybrid":
            return -(-plan.devices // nodes)
    return 1


class Planner:
    """Plans of one workload. Each distinct step is simulated once, not once per machine."""

    def __init__(self, workload: Workload, corrected: Corrected = _as_estimated) -> None:
        """Prepare the search. `corrected`: applies own runs. Raise ValueError for a workload without a shape."""
        if workload.shape is None:
            raise ValueError("nothing is known of this workload, so it cannot be planned")
        self._workload, self._shape = workload, workload.shape
        self._may_shard = may_shard(workload)
        self._corrected = corrected
        self._needs: dict[object, MemoryNeed] = {}
        self._best: dict[object, Planned] = {}
        self._timings: dict[object, Timing] = {}

    def as_planned(self, plan: Plan) -> Workload:
        """Return the workload with the plan's numbers."""
        return replace(self._workload, micro_batch=plan.micro_batch, gradient_checkpointing=plan.gradient_checkpointing)

    def _at_once(self, plan: Plan) -> Workload:
        """Return the planned workload as the simulator needs it, where every sequence counts as a row."""
        work, per_row = self.as_planned(plan), self._workload.sequences
        return replace(work, micro_batch=work.micro_batch * per_row, global_batch=work.global_batch * per_row)

    def run(self, plan: Plan, hardware: Hardware, nodes: int = 1) -> RooflineStep:
        """Return one step under the plan for the time model."""
        work = self.as_planned(plan)
        return run_of(work, self._shape, hardware, devices=plan.devices, nodes=nodes, parallelism=plan.parallelism)

    def timing(self, plan: Plan, hardware: Hardware, nodes: int = 1, cores: int = 1) -> Timing:
        """Return the timing of the plan on the hardware. `cores`: number of cores of a CPU."""
        key = (plan, hardware.name, hardware.link, nodes, cores)
        if key not in self._timings:
            self._timings[key] = timing(self.run(plan, hardware, nodes), hardware, cores=cores)
        return self._timings[key]

    def need(self, plan: Plan, hardware: Hardware, nodes: int = 1) -> MemoryNeed:
        """Return the memory of one device."""
        shards, several = shards_of(plan, nodes), plan.devices > 1
        accumulated = self._workload.global_batch > plan.micro_batch * plan.devices
        key = (
            plan.micro_batch, plan.gradient_checkpointing, several, accumulated, shards, plan.parallelism,
            hardware.bf16, hardware.gpu,
        )  # fmt: skip
        if key not in self._needs:
            if shards > 1:
                need = self._sharded(plan, shards, hardware, accumulated)
            else:  # every device holds the whole model, so their number does not matter
                unsharded = memory(self._at_once(plan), bf16=hardware.bf16, gpu=hardware.gpu, devices=plan.devices)
                assert unsharded is not None
                need = unsharded
            self._needs[key] = self._corrected(self.as_planned(plan), need, hardware.gpu, shards > 1)
        return self._needs[key]

    def _sharded(self, plan: Plan, shards: int, hardware: Hardware, accumulated: bool) -> MemoryNeed:
        work = self._at_once(plan)
        numerics = numerics_of(work, self._shape, bf16=hardware.bf16, gpu=True)
        masters = numerics.full and numerics.compute < numerics.trained
        step = Step(
            numerics=gathered(numerics),
            rows=work.micro_batch,
            length=work.sequence,
            checkpointing=work.gradient_checkpointing,
            accumulated=accumulated,
            optimizer=work.optimizer,
            shards=shards,
            replicas=plan.devices // shards,
            masters=masters,
        )
        peak = simulate(self._shape, step)
        by = peak.segments[peak.worst]
        _, source, margin = evidence_of(self._shape, several=True)
        return MemoryNeed(
            weights=by["weights"],
            gradients=by["gradients"] + by.get("communication", 0),
            optimizer=by["optimizer"],
            activations=by["activations"] + by["temporary"],
            logits=by["logits"],
            context=GPU_CONTEXT,
            margin=max(margin, SHARDED_MARGIN[plan.parallelism]),
            source=source,
        )

    def best(
        self, hardware: Hardware, device_bytes: int, device_count: int, *, computing: Hardware, nodes: int = 1
    ) -> Planned:
        """Return the best plan on `device_count` devices of `device_bytes` each, on `nodes` machines together.

        `hardware` determines the memory, `computing` the time. They differ only if `computing` emulates `hardware`.
        """
        key = (hardware.name, device_bytes, device_count, computing.name, computing.link, nodes)
        if key not in self._best:
            self._best[key] = self._search(hardware, device_bytes, device_count, computing, nodes)
        return self._best[key]

    def _search(
        self, hardware: Hardware, device_bytes: int, device_count: int, computing: Hardware, nodes: int
    ) -> Planned:
        devices = devices_of(self._workload, device_count, nodes)
        timed = _Timed(self, computing, nodes)
        fitting: list[Planned] = []
        smallest: Planned | None = None
        for layouts in parallelism_candidates(devices, nodes, divided=self._may_shard):
            if fitting:
                break
            for layout, checkpointing in product(layouts, self._checkpointings()):
                plans = [timed.plan(layout, devices, rows, checkpointing) for rows in self._rows(devices, computing)]
                needs = [self.need(plan, hardware, nodes).required for plan in plans]
                # Check every plan: a micro-batch of all rows accumulates no gradients, so it may need less memory than
                # a smaller one.
                fit = [plan for plan, required in zip(plans, needs, strict=True) if required <= device_bytes]
                fitting += timed.fastest(
                    [plan for plan in fit if not self._failed(plan, device_bytes, nodes)], hardware
                )
                if smallest is None or min(needs) < smallest.memory.required:
                    smallest = timed.planned(plans[needs.index(min(needs))], hardware, fits=False)
        assert smallest is not None
        if not fitting:
            return smallest
        quickest = min(planned.step_s for planned in fitting)
        return min((planned for planned in fitting if planned.step_s <= SPEED_TIE_RATIO * quickest), key=_by_memory)

    def _failed(self, plan: Plan, device_bytes: int, nodes: int) -> bool:
        """Return True if the job ran out of memory on a device of `device_bytes` or more.

        A plan with more shards than the failed plan is tried nevertheless if its micro-batch is at most
        `oom_micro_batch`.
        """
        work = self._workload
        max_rows = work.oom_micro_batch or plan.micro_batch
        more = shards_of(plan, nodes) > work.oom_shards and plan.micro_batch <= max_rows
        return device_bytes <= work.oom_device_bytes and not more

    def _checkpointings(self) -> tuple[bool, ...]:
        return (False, True) if self._workload.free_checkpointing else (self._workload.gradient_checkpointing,)

    def _rows(self, devices: int, computing: Hardware) -> list[int]:
        work = self._workload
        if not work.free_micro_batch:
            return [work.micro_batch]
        # A CPU, even if it emulates a GPU, is no faster with more rows than the trainer chooses by itself.
        max_rows = MAX_ROWS if computing.gpu else work.micro_batch
        return dividers(work.global_batch // devices, min(max_rows, work.max_micro_batch or max_rows))


def _by_memory(planned: Planned) -> tuple[int, float]:
    return planned.memory.required, planned.step_s


class _Timed:
    """Plans and their step times on one kind of hardware."""

    def __init__(self, planner: Planner, computing: Hardware, nodes: int) -> None:
        self._planner, self._computing, self._nodes = planner, computing, nodes

    def plan(self, layout: Parallelism, devices: int, rows: int, checkpointing: bool) -> Plan:
        rows_per_device = self._planner._workload.global_batch / devices
        return Plan(
            parallelism=layout,
            devices=devices,
            micro_batch=rows,
            accumulation=max(1, round(rows_per_device / rows)),
            gradient_checkpointing=checkpointing,
        )

    def planned(self, plan: Plan, hardware: Hardware, *, fits: bool) -> Planned:
        return Planned(
            plan=plan,
            fits=fits,
            memory=self._planner.need(plan, hardware, self._nodes),
            step_s=step_seconds(self._planner.run(plan, self._computing, self._nodes), self._computing),
        )

    def fastest(self, plans: Sequence[Plan], hardware: Hardware) -> list[Planned]:
        """Return plans by descending number of rows, up to and including the first clearly slower plan.

        More rows are never slower, so all plans of nearly equal speed are among the returned plans.
        """
        near_fastest: list[Planned] = []
        for plan in reversed(plans):
            near_fastest.append(self.planned(plan, hardware, fits=True))
            if near_fastest[-1].step_s > SPEED_TIE_RATIO * near_fastest[0].step_s:
                break
        return near_fastest


def world(plan: Plan | None, *, nodes: int, gpus: int) -> World:
    """Return the process layout.

    Without a plan, as for a script, each process holds the whole model.

    `gpus`: number of GPUs of each node; 0: one process on the CPU. A GPU that the plan leaves idle gets no process,
    because a process would take unplanned memory on the GPU and on the host.
    """
    if plan is not None:
        gpus = min(gpus, -(-plan.devices // nodes))
    shard_sizes = {"fsdp": 0, "hybrid": max(1, gpus)}
    if plan is None or plan.parallelism not in shard_sizes:
        return World(nodes=nodes, gpus_per_node=gpus)
    shared = ProcessParallelism(kind="fsdp", shard=shard_sizes[plan.parallelism])
    return World(nodes=nodes, gpus_per_node=gpus, parallelism=shared)

"""The best plan of a workload on a machine: parallelism, micro-batch, accumulation, checkpointing.

The global batch is the user's. Among the plans that fit with their margin the fastest is taken; of those that are about
as fast the one that needs least memory, since an estimate may be wrong. A model is divided between GPUs only where none
of them holds all of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from broker.domain.workload import MemoryNeed, Parallelism, Plan, Workload
from broker.estimator.memory.evidence import evidence_of
from broker.estimator.memory.job_memory import GPU_CONTEXT, divides, gathered, memory, numerics_of
from broker.estimator.memory.simulator.simulate import simulate
from broker.estimator.memory.simulator.types import Step
from broker.estimator.speed.hardware import Hardware
from broker.estimator.speed.roofline import RooflineStep
from broker.estimator.speed.throughput import Timing, run_of, step_seconds, timing

MOST_ROWS = 64
"""The largest micro-batch that is looked at: by then nothing gets faster."""
MICRO_BATCH_RATIO = 1.5
"""Micro-batches that are tried differ by this factor at least."""
SPEED_TIE_RATIO = 1.02
"""Plans whose steps differ by less are equally fast: far less than the time model can tell."""
SHARDED_MARGIN = {"fsdp": 0.10, "hybrid": 0.15}
"""At the least: FSDP 2 was compared with the tracer alone, hybrid with nothing."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The best plan, or with `fits` False the one that needs least."""

    plan: Plan
    fits: bool
    memory: MemoryNeed
    step_s: float


Corrected = Callable[[Workload, MemoryNeed, bool, bool], MemoryNeed]
"""(planned workload, its estimate, on a GPU, sharded) -> the estimate as own runs have it."""


def _as_estimated(_work: Workload, need: MemoryNeed, _gpu: bool, _sharded: bool) -> MemoryNeed:
    return need


def dividers(rows: int, most: int) -> list[int]:
    """Micro-batches to try for so many rows a device, ascending, each dividing them."""
    found = [1]
    for size in range(2, min(rows, most) + 1):
        if rows % size == 0 and size >= MICRO_BATCH_RATIO * found[-1]:
            found.append(size)
    return found


def devices_of(workload: Workload, there: int, nodes: int = 1) -> int:
    """How many of the devices get as many rows as each other in every step; as many of each machine, if that can be."""
    units = workload.global_batch if workload.free_micro_batch else workload.global_batch // workload.micro_batch
    even = [d for d in range(1, max(1, min(there, units)) + 1) if units % d == 0]
    return max([d for d in even if d % nodes == 0] or even)


def parallelism_candidates(devices: int, nodes: int, *, divided: bool) -> list[list[Parallelism]]:
    """How so many devices can work together; the first that fit are taken. `divided`: the model may be."""
    if devices == 1:
        return [["single"]]
    if not divided:
        return [["ddp"]]
    alike = nodes > 1 and devices > nodes and devices % nodes == 0  # machines that can have a copy each
    return [["ddp"], ["fsdp", "hybrid"] if alike else ["fsdp"]]


def shards_of(plan: Plan, nodes: int) -> int:
    """Devices that weights and states are divided between."""
    match plan.parallelism:
        case "fsdp":
            return plan.devices
        case "hybrid":
            return -(-plan.devices // nodes)
    return 1


class Planner:
    """Plans of one workload. Memory is played once for every step that some machine may take, not once a machine."""

    def __init__(self, workload: Workload, corrected: Corrected = _as_estimated) -> None:
        """`corrected`: by what own runs have shown. Raises ValueError for a workload without a shape."""
        if workload.shape is None:
            raise ValueError("nothing is known of this workload, so it cannot be planned")
        self._workload, self._shape = workload, workload.shape
        self._divides = divides(workload)
        self._corrected = corrected
        self._needs: dict[object, MemoryNeed] = {}
        self._best: dict[object, Planned] = {}
        self._timings: dict[object, Timing] = {}

    def as_planned(self, plan: Plan) -> Workload:
        """The workload with the plan's numbers."""
        return replace(self._workload, micro_batch=plan.micro_batch, gradient_checkpointing=plan.gradient_checkpointing)

    def _at_once(self, plan: Plan) -> Workload:
        """The same as memory sees it, where every sequence of a row is a row."""
        work, each = self.as_planned(plan), self._workload.sequences
        return replace(work, micro_batch=work.micro_batch * each, global_batch=work.global_batch * each)

    def run(self, plan: Plan, hardware: Hardware, nodes: int = 1) -> RooflineStep:
        """One step under the plan, as the time model sees it."""
        work = self.as_planned(plan)
        return run_of(work, self._shape, hardware, devices=plan.devices, nodes=nodes, parallelism=plan.parallelism)

    def timing(self, plan: Plan, hardware: Hardware, nodes: int = 1, cores: int = 1) -> Timing:
        """Its times there. `cores`: of a CPU."""
        key = (plan, hardware.name, hardware.link, nodes, cores)
        if key not in self._timings:
            self._timings[key] = timing(self.run(plan, hardware, nodes), hardware, cores=cores)
        return self._timings[key]

    def need(self, plan: Plan, hardware: Hardware, nodes: int = 1) -> MemoryNeed:
        """Bytes of one device."""
        shards, several = shards_of(plan, nodes), plan.devices > 1
        accumulated = self._workload.global_batch > plan.micro_batch * plan.devices
        key = (
            plan.micro_batch, plan.gradient_checkpointing, several, accumulated, shards, plan.parallelism,
            hardware.bf16, hardware.gpu,
        )  # fmt: skip
        if key not in self._needs:
            if shards > 1:
                found = self._sharded(plan, shards, hardware, accumulated)
            else:  # all of several devices hold the same, however many
                held = memory(self._at_once(plan), bf16=hardware.bf16, gpu=hardware.gpu, devices=plan.devices)
                assert held is not None
                found = held
            self._needs[key] = self._corrected(self.as_planned(plan), found, hardware.gpu, shards > 1)
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
        played = simulate(self._shape, step)
        by = played.segments[played.worst]
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

    def best(self, hardware: Hardware, has: int, there: int, *, computing: Hardware, nodes: int = 1) -> Planned:
        """On `there` devices of `has` bytes each, of `nodes` machines together.

        `computing`: what sets the time, which is another one where `hardware` is emulated.
        """
        key = (hardware.name, has, there, computing.name, computing.link, nodes)
        if key not in self._best:
            self._best[key] = self._search(hardware, has, there, computing, nodes)
        return self._best[key]

    def _search(self, hardware: Hardware, has: int, there: int, computing: Hardware, nodes: int) -> Planned:
        devices = devices_of(self._workload, there, nodes)
        timed = _Timed(self, computing, nodes)
        fitting: list[Planned] = []
        least: Planned | None = None
        for together in parallelism_candidates(devices, nodes, divided=self._divides):
            if fitting:
                break
            for way, checkpointing in product(together, self._checkpointings()):
                plans = [timed.plan(way, devices, rows, checkpointing) for rows in self._rows(devices, computing)]
                needs = [self.need(plan, hardware, nodes).required for plan in plans]
                # Every one is asked: the whole batch at once accumulates no gradients, and may need less than a part.
                fit = [plan for plan, required in zip(plans, needs, strict=True) if required <= has]
                fitting += timed.fastest([plan for plan in fit if not self._failed(plan, has, nodes)], hardware)
                if least is None or min(needs) < least.memory.required:
                    least = timed.planned(plans[needs.index(min(needs))], hardware, fits=False)
        assert least is not None
        if not fitting:
            return least
        quickest = min(one.step_s for one in fitting)
        return min((one for one in fitting if one.step_s <= SPEED_TIE_RATIO * quickest), key=_by_memory)

    def _failed(self, plan: Plan, has: int, nodes: int) -> bool:
        """The least plan has run out of memory on as large devices, of which no fewer shared the model, or it would
        have more rows than that one.
        """
        work = self._workload
        most = work.oom_micro_batch or plan.micro_batch
        more = shards_of(plan, nodes) > work.oom_shards and plan.micro_batch <= most
        return has <= work.oom_device_bytes and not more

    def _checkpointings(self) -> tuple[bool, ...]:
        return (False, True) if self._workload.free_checkpointing else (self._workload.gradient_checkpointing,)

    def _rows(self, devices: int, computing: Hardware) -> list[int]:
        work = self._workload
        if not work.free_micro_batch:
            return [work.micro_batch]
        # A CPU, of one's own or in place of a simulated GPU, gains nothing by more rows than the trainer's own choice.
        most = MOST_ROWS if computing.gpu else work.micro_batch
        return dividers(work.global_batch // devices, min(most, work.max_micro_batch or most))


def _by_memory(one: Planned) -> tuple[int, float]:
    return one.memory.required, one.step_s


class _Timed:
    """Plans and their steps on one kind of hardware."""

    def __init__(self, planner: Planner, computing: Hardware, nodes: int) -> None:
        self._planner, self._computing, self._nodes = planner, computing, nodes

    def plan(self, way: Parallelism, devices: int, rows: int, checkpointing: bool) -> Plan:
        each = self._planner._workload.global_batch / devices
        return Plan(
            parallelism=way,
            devices=devices,
            micro_batch=rows,
            accumulation=max(1, round(each / rows)),
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
        """The one of most rows and, down from there, all that are about as fast: more rows are never slower."""
        found: list[Planned] = []
        for plan in reversed(plans):
            found.append(self.planned(plan, hardware, fits=True))
            if found[-1].step_s > SPEED_TIE_RATIO * found[0].step_s:
                break
        return found

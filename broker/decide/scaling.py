"""What more GPUs would bring: for each count the best plan, its throughput, utilisation, hours and dollars.

All that the estimators know is looked at, also what gpubroker's own trainer cannot run yet; such rows say so. Machines
have eight GPUs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from broker.decide import estimate as sizes
from broker.decide.hardware import Hardware
from broker.decide.memory_held import trained_parameters
from broker.decide.plans import ABOUT, MOST_ROWS, dividers
from broker.decide.roofline import Run, ideal, model_flop, terms
from broker.decide.throughput import spread_of
from broker.domain.workload import ModelShape, Parallelism, Plan
from trainer.contract.train import PARALLELISMS

A_MACHINE = 8
"""GPUs."""
Sharding = Literal["none", "ddp", "fsdp", "hybrid"]
SHARDED: dict[Parallelism, Sharding] = {"single": "none", "ddp": "ddp", "fsdp": "fsdp", "hybrid": "hybrid"}


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is to be trained. `tokens_per_row`: mean; the longest row is the ask's length. `written_per_row`: what an
    encoder-decoder writes for it."""

    global_batch: int
    tokens_per_row: float
    steps: int
    written_per_row: float = 0.0
    usd_per_gpu_hour: float | None = None


@dataclass(frozen=True, kw_only=True)
class Point:
    """One count of GPUs; `plan` is None where nothing fits. Rates are of all GPUs together."""

    gpus: int
    nodes: int
    need_bytes: int
    """Of one GPU, with its margin and the context; of the plan that needs least where none fits."""
    plan: Plan | None = None
    runnable: bool = False
    """gpubroker's own trainer can do it."""
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    low: float = 0.0
    high: float = 0.0
    """The interval of `tokens_per_s`."""
    mfu: float = 0.0
    """Arithmetic of the model, recomputation left out, over the datasheet's bf16 rate of all GPUs."""
    hours: float = 0.0
    """Of training alone, undisturbed."""
    usd: float | None = None


def unmeasured(ask: sizes.Ask) -> str | None:
    """Why nothing can be said about the time; None: something can."""
    if ask.method in ("lora8", "adapter"):
        what = "on an 8-bit base" if ask.method == "lora8" else "of such an adapter"
        return f"no basis: no run {what} was measured, and its kernels are not counted"
    return None


def run_of(
    shape: ModelShape, ask: sizes.Ask, plan: Plan, tokens_per_row: float, nodes: int = 1, *, written: float = 0.0
) -> Run:
    """One step under the plan. `written`: tokens that an encoder-decoder writes for a row."""
    asked = replace(ask, gpus=plan.devices, sharding="fsdp" if plan.parallelism in ("fsdp", "hybrid") else "none")
    numerics = sizes.numerics(shape, asked)[0]
    return Run(
        shape=shape,
        numerics=numerics,
        tokens=plan.micro_batch * tokens_per_row,
        length=tokens_per_row,
        written=plan.micro_batch * written,
        written_length=written,
        trained=trained_parameters(shape, numerics),
        micro_batches=plan.accumulation,
        recompute="early" if plan.gradient_checkpointing else "none",
        optimizer=ask.optimizer,
        devices=plan.devices,
        nodes=min(nodes, plan.devices),
        sharding=SHARDED[plan.parallelism],
        reduced=numerics.compute,
    )


def utilisation(run: Run, hardware: Hardware, tokens_per_s: float) -> float:
    """Model FLOP utilisation of all devices at that rate."""
    return model_flop(run) * tokens_per_s / (hardware.bf16_flops * run.devices)


def scaling(
    shape: ModelShape, ask: sizes.Ask, hardware: Hardware, counts: Sequence[int], load: Load
) -> tuple[Point, ...]:
    """A point for each count. Raises Unanswerable; `ask`'s rows, checkpointing, GPUs and sharding are chosen here."""
    sizes.check(shape, replace(ask, gpus=1, sharding="none"))
    if (why := unmeasured(ask)) is not None:
        raise sizes.Unanswerable(f"--what-if: {why}")
    scale = _Scale(shape, ask, hardware, load)
    return tuple(scale.point(count) for count in counts)


class _Scale:
    def __init__(self, shape: ModelShape, ask: sizes.Ask, hardware: Hardware, load: Load) -> None:
        self._shape, self._ask, self._hardware, self._load = shape, ask, hardware, load
        self._need = cache(self._needed)

    def point(self, gpus: int) -> Point:
        nodes = -(-gpus // A_MACHINE)
        devices = max(d for d in range(1, min(gpus, self._load.global_batch) + 1) if self._load.global_batch % d == 0)
        candidates = [
            self._most_rows(way, devices, nodes, again) for way in self._ways(devices, nodes) for again in (False, True)
        ]
        fitting = [plan for plan, fits in candidates if fits]
        if not fitting:
            return Point(gpus=gpus, nodes=nodes, need_bytes=min(self._of(plan, nodes) for plan, _ in candidates))
        times = {plan: self._step_s(plan, nodes) for plan in fitting}
        quickest = min(times.values())
        near = [plan for plan in fitting if times[plan] <= ABOUT * quickest]
        return self._made(gpus, nodes, min(near, key=lambda plan: (self._of(plan, nodes), times[plan])))

    def _ways(self, devices: int, nodes: int) -> list[Parallelism]:
        if devices == 1:
            return ["single"]
        if self._shape.decoder_layers:  # how it would be divided is not known
            return ["ddp"]
        return ["ddp", "fsdp"] if nodes == 1 else ["ddp", "fsdp", "hybrid"]

    def _most_rows(self, way: Parallelism, devices: int, nodes: int, again: bool) -> tuple[Plan, bool]:
        """The plan with most rows at once that fits, else that with one."""
        each, plan = self._load.global_batch // devices, None
        for rows in dividers(each, MOST_ROWS):
            more = Plan(
                parallelism=way, devices=devices, micro_batch=rows, accumulation=each // rows,
                gradient_checkpointing=again,
            )  # fmt: skip
            if self._of(more, nodes) > self._hardware.memory_bytes:
                return plan or more, plan is not None
            plan = more
        assert plan is not None
        return plan, True

    def _of(self, plan: Plan, nodes: int) -> int:
        """Bytes that one GPU needs."""
        several = {"single": 1, "ddp": 2, "fsdp": plan.devices, "hybrid": -(-plan.devices // nodes)}
        return self._need(
            plan.micro_batch, plan.accumulation > 1, plan.gradient_checkpointing, plan.parallelism == "ddp",
            several[plan.parallelism],
        )  # fmt: skip

    def _needed(self, rows: int, accumulated: bool, again: bool, whole: bool, devices: int) -> int:
        asked = replace(
            self._ask, rows=rows, accumulated=accumulated, checkpointing=again, gpus=devices,
            sharding="none" if devices == 1 else "ddp" if whole else "fsdp",
        )  # fmt: skip
        found = sizes.estimate(self._shape, asked)
        return int(found.peak_allocated * (1 + found.margin)) + sizes.CONTEXT

    def _step_s(self, plan: Plan, nodes: int) -> float:
        return terms(ideal(self._run(plan, nodes), self._hardware)).total

    def _run(self, plan: Plan, nodes: int) -> Run:
        load = self._load
        return run_of(self._shape, self._ask, plan, load.tokens_per_row, nodes, written=load.written_per_row)

    def _made(self, gpus: int, nodes: int, plan: Plan) -> Point:
        load = self._load
        run, step = self._run(plan, nodes), self._step_s(plan, nodes)
        tokens = load.tokens_per_row + load.written_per_row
        rate, spread = load.global_batch * tokens / step, spread_of(run, self._hardware)[0]
        hours, price = load.steps * step / 3600, load.usd_per_gpu_hour
        return Point(
            gpus=gpus,
            nodes=nodes,
            need_bytes=self._of(plan, nodes),
            plan=plan,
            runnable=plan.parallelism in PARALLELISMS,
            step_s=step,
            tokens_per_s=rate,
            low=rate / spread,
            high=rate * spread,
            mfu=utilisation(run, self._hardware, rate),
            hours=hours,
            usd=None if price is None else hours * price * gpus,
        )


def counts_of(said: str) -> tuple[int, ...]:
    """`gpus=1,2,4,…,512` as numbers: `…` or `...` goes on by the last factor. Raises ValueError with one line."""
    name, _, listed = said.partition("=")
    if name.strip() != "gpus" or not listed:
        raise ValueError(f"--what-if {said}: write gpus=1,2,4,8 or gpus=1,2,...,512")
    found: list[int] = []
    going = False
    for word in listed.replace("...", "…").split(","):
        if word.strip() == "…":
            going = True
            continue
        if not word.strip().isdecimal() or not 1 <= (number := int(word)) <= MOST_GPUS:
            what = word.strip() or "nothing"
            raise ValueError(f"--what-if {said}: {what} is no number of GPUs from 1 to {MOST_GPUS}")
        while going and found and found[-1] * _factor(found) < number:
            found.append(found[-1] * _factor(found))
        going = False
        found.append(number)
    if going or found != sorted(set(found)):
        raise ValueError(f"--what-if {said}: give ascending numbers, each once, and end with one")
    return tuple(found)


MOST_GPUS = 16_384


def _factor(found: Sequence[int]) -> int:
    return max(2, math.floor(found[-1] / found[-2])) if len(found) > 1 else 2

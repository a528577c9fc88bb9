"""Peak memory of a fine-tune, traced without a GPU or weights: `python -m trainer.memtrace --config CONFIG.json`.

The real model class takes one optimizer step of the trainer's own loop on the meta device, with three layers and with
four. Every segment of the step is linear in the number of layers, so its peak at full depth follows. What is not
counted: the device context, the allocator's fragmentation, several devices.
"""

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import accelerate
import peft
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from trainer import model as models
from trainer import parallel, tasks
from trainer.asif import BLOCK, AsIf, allowed
from trainer.checkpoint_plan import Progress
from trainer.contract.train import DataConfig, FullConfig, LoraConfig, TrainConfig
from trainer.dataset import Example
from trainer.faults import Fault
from trainer.loop import Loop
from trainer.storages import Storages, in_backward

TRACED = 3, 4
"""Layers of the two traces; with three the first, the last and one between differ."""
DEPTH = ("num_hidden_layers", "n_layer")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
CATEGORIES = ("weights", "gradients", "optimizer", "activations", "logits", "temporary")


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What to trace; defaults as the trainer's. `sequence`: tokens of every row."""

    train: TrainConfig
    sequence: int
    device: str = "cuda"
    foreach: bool = False
    """AdamW's foreach kernels in place of the fused one."""
    padded: bool = False
    """Rows differ in length, so attention takes a mask."""
    pure: bool = False
    """Weights are held and computed with in the half precision itself, without autocast."""
    targets: tuple[str, ...] = ()
    """Names of the modules that get adapters, in place of the trainer's choice."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The worst moment of a step: bytes by category, and where in the step it is."""

    peak_allocated_bytes: int
    segment: str
    by_category: Mapping[str, int]
    segments: Mapping[str, int]
    """Peak of every segment."""


class _Untouched:
    """In place of snapshots and a run folder: nothing is saved, nobody asks for a drain."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages

    def before_update(self) -> None:
        self._storages.enter("optimizer", "temporary")


class _Probe(Loop):
    """The trainer's loop around a model that is given, for one step of one micro-batch."""

    def __init__(self, ask: Ask, model: Any, storages: Storages) -> None:
        config = ask.train
        self._config, self._world, self._rank = config, 1, 0
        mixed = "no" if config.precision == "fp32" or ask.pure else "bf16"  # fp16 takes the same bytes
        cuda = next(model.parameters()).device.type == "cuda"
        self._accelerator = accelerate.Accelerator(cpu=not cuda, mixed_precision=mixed, device_placement=False)
        self._parameters = models.trainable(model)
        optimizer = models.optimizer_of(self._parameters, config.optim)
        if ask.foreach:
            for group in optimizer.param_groups:
                group.update(fused=None, foreach=True)
        self._bare = model
        self._device = next(model.parameters()).device
        self._parallel = parallel.Copies(self._accelerator)
        self._model, self._optimizer = self._parallel.prepare(model, optimizer)
        self._snapshots: Any = _Untouched(storages)
        self._progress, self._total, self._task = Progress(), 1, tasks.of(config)
        self._rows = [Example(ids=[1] * ask.sequence, prompt=0)] * config.rows_at_once
        if ask.padded:
            self._rows[-1] = Example(ids=[1] * (ask.sequence - 1), prompt=0)

    def _batches(self) -> tuple[list[list[Example]], int]:
        return [self._rows], sum(e.targets for e in self._rows)

    def _record(self, row: dict[str, float], tokens: int, seconds: float) -> None:
        pass

    def warm(self) -> None:
        """Makes the optimizer's state, as after the first step."""
        for parameter in self._parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def step(self, storages: Storages) -> None:
        """One step in the steady state; before the last of several micro-batches, with gradients accumulated."""
        for tensor in (*self._bare.parameters(), *self._bare.buffers()):
            storages.hold(tensor, "weights")
        for state in self._optimizer.state.values():
            for value in state.values():
                storages.hold(value, "optimizer")
        accumulated = self._config.global_batch > self._config.rows_at_once
        for parameter in self._parameters.values():
            parameter.register_post_accumulate_grad_hook(lambda p: storages.hold(p.grad, "gradients"))
            if accumulated:
                parameter.grad = torch.zeros_like(parameter)
                storages.hold(parameter.grad, "gradients")
        self._bare.train()
        self._step()


def _layers(model: Any) -> torch.nn.ModuleList:
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    return max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))


def _tensor(value: Any) -> torch.Tensor:
    found: torch.Tensor = value if isinstance(value, torch.Tensor) else value[0]
    return found


def mark(model: Any, storages: Storages) -> None:
    """Names the segments of the step as the layers are entered and left, forward and backward."""
    layers = _layers(model)
    last = len(layers) - 1

    def entered(number: int, inputs: Any) -> None:
        if in_backward():
            return
        storages.enter(f"forward {number}", "activations")
        if number == 0 and inputs and _tensor(inputs).requires_grad:
            _tensor(inputs).register_hook(lambda _: storages.enter("backward embeddings", "temporary"))

    def left(number: int, output: Any) -> None:
        if in_backward():
            return
        if _tensor(output).requires_grad:
            _tensor(output).register_hook(lambda _: storages.enter(f"backward {number}", "temporary"))
        if number == last:
            storages.enter("forward head", "logits")

    for i, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda _, inputs, i=i: entered(i, inputs))
        layer.register_forward_hook(lambda _, __, output, i=i: left(i, output))


def watch(storages: Storages, asif: AsIf | None) -> None:
    """Keeps the category right where no module tells: at the loss, and where checkpointing computes again."""

    def before() -> None:
        if not in_backward():
            return
        again = torch.is_grad_enabled()
        if asif is not None and not again:
            asif.forget()
        if storages.segment == "forward head":
            storages.enter("backward head", "logits")
        if storages.segment != "backward head":
            storages.category = "activations" if again else "temporary"

    storages.on_operation = before


def _build(config: Mapping[str, Any], layers: int, ask: Ask, *, device: str) -> Any:
    """The trainer's model, of so many layers. Raises ValueError for what transformers cannot build."""
    fields = dict(config)
    depth = next((fields[k] for k in DEPTH if k in fields), None)
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == depth:
            fields[name] = value[:layers]
    fields.update({k: layers for k in DEPTH if k in fields})
    half = torch.float32 if ask.train.precision == "fp32" else torch.bfloat16
    kept = half if isinstance(ask.train.method, LoraConfig) or ask.pure else torch.float32
    with torch.device(device):
        built = AutoConfig.for_model(str(fields.pop("model_type", None)), **fields)
        model = AutoModelForCausalLM.from_config(built, dtype=kept)
        model.config.use_cache = False
        return models.wrap(model, ask.train, targets=ask.targets)


@contextlib.contextmanager
def _as_if(ask: Ask, *, real: bool) -> Iterator[AsIf | None]:
    if real:
        yield None
        return
    with allowed(), AsIf(ask.device) as asif:
        yield asif


def trace(config: Mapping[str, Any], layers: int, ask: Ask, *, real: bool = False) -> Mapping[str, dict[str, int]]:
    """Bytes by category at the worst moment of each segment of a step with so many layers.

    `real`: on this machine's CPU with all its arithmetic, to compare with.
    """
    storages = Storages("cpu" if real else "meta", block=1 if real else BLOCK[ask.device])
    storages.answer = not ask.padded
    with _as_if(ask, real=real) as asif:
        probe = _Probe(ask, model := _build(config, layers, ask, device="cpu" if real else "meta"), storages)
        probe.warm()
        mark(model, storages)
        watch(storages, asif)
        storages.segment, storages.category = "forward embeddings", "activations"
        with storages:
            probe.step(storages)
    return {name: categories for name, (_, categories) in storages.peaks.items()}


def measure(config: Mapping[str, Any], ask: Ask, steps: int = 3) -> dict[str, int]:
    """What the same steps really take of this machine's GPU, with random weights; bytes. `device_used_bytes` is what
    the driver counts of the whole GPU, so nobody else may use it."""
    layers = next(config[k] for k in DEPTH if k in config)
    probe = _Probe(ask, _build(config, layers, ask, device="cuda"), Storages("meta"))
    probe._bare.train()
    for _ in range(steps):
        torch.cuda.reset_peak_memory_stats()
        probe._step()
    free, total = torch.cuda.mem_get_info()
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_used_bytes": total - free,
    }


def _kinds(segments: Mapping[str, dict[str, int]], layers: int) -> dict[str, dict[str, int]]:
    """The segments by what they are in a model of any depth; those between are between these."""
    named = {"first": 0, "second": 1, "last but one": layers - 2, "last": layers - 1}
    found = {name: s for name, s in segments.items() if not name[-1].isdigit()}
    for way in ("forward", "backward"):
        found |= {
            f"{way} {kind} layer": segments[f"{way} {n}"] for kind, n in named.items() if f"{way} {n}" in segments
        }
    return found


def at_depth(traces: Sequence[tuple[int, Mapping[str, dict[str, int]]]], depth: int) -> dict[str, dict[str, int]]:
    """The segments' categories with so many layers, from traces of (layers, segments): a line through both."""
    (few, first), (_, second) = traces[0], traces[-1]
    low, high = _kinds(first, few), _kinds(second, traces[-1][0])

    def line(name: str, category: str) -> int:
        value = low[name].get(category, 0)
        return value + (depth - few) * (high[name].get(category, 0) - value)

    return {name: {c: line(name, c) for c in CATEGORIES} for name in low if name in high}


def extrapolate(config: Mapping[str, Any], ask: Ask) -> Peak:
    """The peak of a step at the config's full depth. Raises ValueError."""
    if any(config.get(k) for k in EXPERTS):
        raise ValueError("a mixture of experts cannot be traced: which expert computes what follows from the data")
    depth = next((config[k] for k in DEPTH if isinstance(config.get(k), int)), 0)
    if depth < 1:
        raise ValueError(f"config has no positive {DEPTH[0]}")
    few = TRACED if depth > max(TRACED) else (depth,)
    peaks = at_depth([(n, trace(config, n, ask)) for n in few], depth)
    totals = {name: sum(categories.values()) for name, categories in peaks.items()}
    worst = max(totals, key=lambda name: totals[name])
    return Peak(peak_allocated_bytes=totals[worst], segment=worst, by_category=peaks[worst], segments=totals)


def _ask(args: argparse.Namespace) -> Ask:
    chosen = args.lora_targets in ("all-linear", "attention")
    lora = LoraConfig(r=args.lora_r, dropout=args.lora_dropout, targets=args.lora_targets if chosen else "all-linear")
    if args.padded and args.micro_batch < 2:
        raise ValueError("a micro-batch of one row has no padding; leave out --padded")
    train = TrainConfig(
        model="traced",
        data=DataConfig(path="traced.jsonl", completion="{text}"),
        method=lora if args.method == "lora" else FullConfig(),
        micro_batch=args.micro_batch,
        global_batch=args.global_batch or args.micro_batch,
        max_length=max(8, args.seq),
        precision=args.precision.removesuffix("-pure"),
        gradient_checkpointing=args.gradient_checkpointing,
    )
    return Ask(
        train=train,
        sequence=args.seq,
        device=args.device,
        foreach=args.optimizer == "adamw_foreach",
        padded=args.padded,
        pure=args.precision.endswith("-pure"),
        targets=() if chosen else tuple(args.lora_targets.split(",")),
    )


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.memtrace", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--config", type=Path, required=True, help="a transformers config.json of a decoder")
    parser.add_argument("--method", choices=("full", "lora"), default="lora")
    parser.add_argument("--optimizer", choices=("adamw_fused", "adamw_foreach"), default="adamw_fused")
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp32", "bf16-pure", "fp16-pure"), default="bf16")
    parser.add_argument("--seq", type=int, default=512, help="tokens of every row")
    parser.add_argument("--padded", action="store_true", help="rows differ in length; needs two or more")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--global-batch", type=int, default=0, help="default: one micro-batch")
    parser.add_argument("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--lora-r", type=int, default=16)
    parser.add_argument("--lora-dropout", type=float, default=0.05)
    parser.add_argument("--lora-targets", default="all-linear", help="attention, or names with commas between")
    parser.add_argument("--device", choices=tuple(BLOCK), default="cuda", help="whose kernels to stand in for")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the peak as one JSON object; 2 with one line on stderr for what cannot be traced."""
    args = _arguments().parse_args(argv)
    try:
        config = json.loads(args.config.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("is not a JSON object")
        started = time.monotonic()
        peak = extrapolate(config, _ask(args))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, Fault) as e:
        print(f"{args.config}: {(str(e).strip().splitlines() or [type(e).__name__])[0]}", file=sys.stderr)
        return 2
    versions = {m.__name__: m.__version__ for m in (torch, transformers, peft)}
    seconds = math.ceil((time.monotonic() - started) * 1000) / 1000
    print(json.dumps({**asdict(peak), "versions": versions, "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

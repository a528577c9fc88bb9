"""Peak memory of a fine-tune, traced without a GPU or weights: `python -m trainer.memtrace --config CONFIG.json`.

The real model class takes one optimizer step of the trainer's own loop on the meta device, with three layers and with
four. Every segment of the step is linear in the number of layers, so its peak at full depth follows. With several GPUs
it is the first GPU's peak. Not counted: the device context, NCCL's memory, the allocator's fragmentation.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from trainer.memtrace import quantised, unet
from trainer.memtrace.device_emulation import BLOCK, DeviceEmulation, allowed, one_autocast
from trainer.memtrace.inputs import HEADED, depths_of, fresh_of, task_of, untie, with_depths
from trainer.memtrace.probe import Probe, TraceOptions
from trainer.memtrace.storage_tracker import Storages, in_backward
from trainer.models import adapters
from trainer.training import determinism

TRACED = 3, 4
"""Layers of the two traces. Three are the fewest that include a first, a middle and a last layer."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
CATEGORIES = ("weights", "gradients", "optimizer", "activations", "logits", "temporary", "communication")


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Worst moment of a step: bytes by category, and the segment."""

    peak_allocated_bytes: int
    segment: str
    by_category: Mapping[str, int]
    segments: Mapping[str, int]
    """Peak of every segment."""


def _stacks(model: Any, count: int) -> list[torch.nn.ModuleList]:
    """Return the lists of layers in the order of computation: the largest ones that no other list contains."""
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, torch.nn.ModuleList)]
    outer = [m for name, m in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    largest = sorted(outer, key=lambda m: sum(p.numel() for p in m.parameters()), reverse=True)[:count]
    return [m for m in outer if any(m is other_stack for other_stack in largest)]


def _tensor(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value if isinstance(value, torch.Tensor) else value[0]
    return tensor


def mark(model: Any, storages: Storages, count: int = 1) -> None:
    """Name the segments of the step when the layers of each stack begin and end, forward and backward."""
    stacks = _stacks(model, count)
    words = [""] if count == 1 else ["encoder ", "decoder "]
    for number, (layers, word) in enumerate(zip(stacks, words, strict=True)):
        after = "head" if number == len(stacks) - 1 else "between"
        _mark_stack(layers, storages, word, "embeddings" if number == 0 else "between", after)


def _mark_stack(layers: torch.nn.ModuleList, storages: Storages, word: str, before: str, after: str) -> None:
    last = len(layers) - 1

    def entered(number: int, inputs: Any) -> None:
        if in_backward():
            return
        storages.enter(f"forward {word}{number}", "activations")
        if number == 0 and inputs and _tensor(inputs).requires_grad:
            _tensor(inputs).register_hook(lambda _: storages.enter(f"backward {before}", "temporary"))

    def left(number: int, output: Any) -> None:
        if in_backward():
            return
        if _tensor(output).requires_grad:
            _tensor(output).register_hook(lambda _: storages.enter(f"backward {word}{number}", "temporary"))
        if number == last:
            storages.enter(f"forward {after}", "logits" if after == "head" else "activations")

    for i, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda _, inputs, i=i: entered(i, inputs))
        layer.register_forward_hook(lambda _, __, output, i=i: left(i, output))


def watch(storages: Storages, emulation: DeviceEmulation | None) -> None:
    """Set the category where no module does: at the loss, and during recomputation by checkpointing."""

    def before() -> None:
        if not in_backward():
            return
        recomputing = torch.is_grad_enabled()
        if emulation is not None and not recomputing:
            emulation.forget()
        if storages.segment == "forward head":
            storages.enter("backward head", "logits")
        if storages.segment != "backward head":
            storages.category = "activations" if recomputing else "temporary"

    storages.on_operation = before


def _build(config: Mapping[str, Any], depths: Sequence[int], ask: TraceOptions, task: Any, *, device: str) -> Any:
    """Build the trainer's model with `depths` layers. Raise ValueError if transformers cannot build the model."""
    if ask.task == "text_to_image":
        with torch.device(device):
            return unet.built(config, ask.train, _weight_dtype(ask), ask.targets)
    fields = with_depths(config, depths)
    family = str(fields.pop("model_type", None))
    with torch.device(device):
        built = AutoConfig.for_model(family, **fields)
        model = getattr(transformers, task.model.architecture).from_config(
            built,
            dtype=_weight_dtype(ask),
            attn_implementation=None if ask.attention == "sdpa" else ask.attention,  # sdpa, unless the model has none
        )
        untie(model, config)
        model.config.use_cache = False
        if ask.task in HEADED and getattr(model.config, "pad_token_id", None) is None:
            model.config.pad_token_id = 0  # a decoder finds the last token by it
        fresh = fresh_of(ask.task, family)
        if ask.train.quantised is not None:
            model = quantised.quantise(
                model, ask.train, task.model.architecture, _weight_dtype(ask), norms=not ask.pure
            )
        return adapters.wrap(model, ask.train, task.model.peft_type, fresh, targets=ask.targets)


def _weight_dtype(ask: TraceOptions) -> torch.dtype:
    """Return the type of the base's weights."""
    half = torch.float32 if ask.train.precision == "fp32" else torch.bfloat16
    return half if ask.train.adapters is not None or ask.pure else torch.float32


@contextlib.contextmanager
def _emulate(ask: TraceOptions, *, real: bool) -> Iterator[DeviceEmulation | None]:
    if real:
        yield None
        return
    with (
        allowed(),
        one_autocast() if ask.device == "cuda" and ask.train.quantised else contextlib.nullcontext(),
        DeviceEmulation(ask.device) as emulation,
    ):
        yield emulation


@contextlib.contextmanager
def _fake_peers(ask: TraceOptions, storages: Storages, *, real: bool) -> Iterator[None]:
    """Simulate the other processes, if there are several."""
    if ask.gpus == 1:
        yield
        return
    from trainer.memtrace import fake_distributed

    with fake_distributed.joined(ask.gpus), fake_distributed.recording_communication(storages, meta=not real):
        yield


def trace(
    config: Mapping[str, Any], layers: int | Sequence[int], ask: TraceOptions, *, real: bool = False
) -> Mapping[str, dict[str, int]]:
    """Return bytes by category at the worst moment of each segment, with `layers` layers (of each stack).

    `real`: run on this machine's CPU with all its arithmetic, to compare with.
    """
    storages = Storages("cpu" if real else "meta", block=1 if real else BLOCK[ask.device])
    storages.answer = not ask.padded
    if ask.train.quantised is not None:
        storages.replacements.append(quantised.decomposed_gemm)
    with _fake_peers(ask, storages, real=real), _emulate(ask, real=real) as emulation:
        task, depths = task_of(ask.task, ask.train, config), (layers,) if isinstance(layers, int) else tuple(layers)
        device = "cpu" if real else "meta"
        probe = Probe(ask, lambda: _build(config, depths, ask, task, device=device), storages, task, device)
        probe.warm()
        model = probe.trained.bare
        storages.peaks.clear()
        if ask.task == "text_to_image":
            unet.mark(model, storages)
        else:
            mark(model, storages, len(depths))
        watch(storages, emulation)
        storages.segment, storages.category = "forward embeddings", "activations"
        with storages:
            probe.step(storages)
    return {name: categories for name, (_, categories) in storages.peaks.items()}


def on_gpu(config: Mapping[str, Any], ask: TraceOptions) -> Probe:
    """Return the step of the whole model with random weights on this machine's GPU, deterministic as in the worker."""
    determinism.begin()
    determinism.require()
    task, depths = task_of(ask.task, ask.train, config), depths_of(config)
    probe = Probe(ask, lambda: _build(config, depths, ask, task, device="cuda"), Storages("meta"), task, "cuda")
    probe.trained.bare.train()
    torch.cuda.empty_cache()  # frees memory that building and quantising needed, but that loading a model does not need
    return probe


def measure(config: Mapping[str, Any], ask: TraceOptions, lasts_s: float, steps: int = 3) -> dict[str, float]:
    """Measure the memory and time of the same steps on this machine's GPU.

    `step_s` is the mean of the steps in `lasts_s` seconds after the first `steps`. `device_used_bytes` is the driver's
    count for the whole GPU, so no other process may use it.
    """
    probe = on_gpu(config, ask)
    for _ in range(steps):
        torch.cuda.reset_peak_memory_stats()
        probe.run_step()
    free, total = torch.cuda.mem_get_info()
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_used_bytes": total - free,
        "step_s": timed(probe, lasts_s),
    }


def timed(probe: Probe, lasts_s: float) -> float:
    """Return the mean seconds of the steps that begin within `lasts_s` seconds."""
    torch.cuda.synchronize()
    started, count = time.monotonic(), 0
    while time.monotonic() < started + lasts_s:
        probe.run_step()
        count += 1
    torch.cuda.synchronize()
    return (time.monotonic() - started) / count


def count(config: Mapping[str, Any], ask: TraceOptions) -> tuple[int, int]:
    """Return (parameters of the base model, trained parameters) at the config's full depth."""
    task = task_of(ask.task, ask.train, config)
    with _emulate(ask, real=False):
        named = dict(_build(config, depths_of(config), ask, task, device="meta").named_parameters())
    base = sum(p.numel() for name, p in named.items() if "lora_" not in name and ".modules_to_save." not in name)
    return base, sum(p.numel() for p in named.values() if p.requires_grad)


def _kinds(segments: Mapping[str, dict[str, int]], layers: Sequence[int]) -> dict[str, dict[str, int]]:
    """Name the segments by their place in a model of any depth.

    Middle layers are bounded by the second and the last but one.
    """
    named_segments = {name: s for name, s in segments.items() if not name[-1].isdigit()}
    for depth, word in zip(layers, [""] if len(layers) == 1 else ["encoder ", "decoder "], strict=True):
        named = {"first": 0, "second": 1, "last but one": depth - 2, "last": depth - 1}
        for direction in (f"forward {word}", f"backward {word}"):
            named_segments |= {
                f"{direction}{kind} layer": segments[f"{direction}{n}"]
                for kind, n in named.items()
                if f"{direction}{n}" in segments
            }
    return named_segments


Traced = tuple[Sequence[int], Mapping[str, dict[str, int]]]
"""Layers of each stack, and the segments of a step with these layers."""


def at_depth(traces: Sequence[Traced], depths: Sequence[int]) -> dict[str, dict[str, int]]:
    """Extrapolate the segments' categories to `depths` layers.

    The line goes from the first trace through the trace with more layers in that stack.
    """
    few, first = traces[0]
    low = _kinds(first, few)
    higher = [(next(i for i, n in enumerate(at) if n != few[i]), _kinds(s, at)) for at, s in traces[1:]]

    def line(name: str, category: str) -> int:
        value = low[name].get(category, 0)
        steps = ((depths[i] - few[i]) * (high[name].get(category, 0) - value) for i, high in higher)
        return value + sum(steps)

    common = [name for name in low if all(name in high for _, high in higher)]
    return {name: {c: line(name, c) for c in CATEGORIES} for name in common}


def _mixed(config: Mapping[str, Any], depths: Sequence[int], length: int) -> bool:
    """Return True if only some layers need a mask for rows of `length`, so that memory is not linear in the depth."""
    built: Any = AutoConfig.for_model(**with_depths(config, depths))
    kinds, window = getattr(built, "layer_types", None) or (), getattr(built, "sliding_window", None)
    return len(set(kinds)) > 1 and window is not None and length >= window


def extrapolate(config: Mapping[str, Any], ask: TraceOptions) -> Peak:
    """Return the peak of a step at the config's full depth. Raise ValueError."""
    return _peak(segments(config, ask))


def segments(config: Mapping[str, Any], ask: TraceOptions) -> Mapping[str, dict[str, int]]:
    """Return bytes by category at the worst moment of each segment at the config's full depth. Raise ValueError."""
    if ask.task == "text_to_image":
        return trace(config, (), ask)
    if any(config.get(k) for k in EXPERTS):
        raise ValueError("a mixture of experts cannot be traced, because the data decides which expert computes what")
    depths = depths_of(config)
    if _mixed(config, depths, ask.sequence):
        traced = trace(config, depths, ask)
        return {**{n: s for n, s in traced.items() if n[-1].isdigit()}, **_kinds(traced, depths)}
    base = tuple(TRACED[0] if depth > max(TRACED) else depth for depth in depths)
    combinations = [base]
    for i, depth in enumerate(depths):
        if depth > max(TRACED):
            combinations.append((*base[:i], TRACED[1], *base[i + 1 :]))
    return at_depth([(at, trace(config, at, ask)) for at in combinations], depths)


def _peak(peaks: Mapping[str, dict[str, int]]) -> Peak:
    totals = {name: sum(categories.values()) for name, categories in peaks.items()}
    worst = max(totals, key=lambda name: totals[name])
    return Peak(peak_allocated_bytes=totals[worst], segment=worst, by_category=peaks[worst], segments=totals)

"""Cost of bitwise repeatable steps on this machine's GPU: `python -m benchmarks.gpu_exact`.

The trainer's own step with random weights of published shapes runs in three modes of torch. The first takes any kernel.
The second takes repeatable kernels where torch's `warn_only` finds them. The third is the trainer's
(`trainer.training.determinism`). `same`: two steps from the same weights, rows and noise have bitwise the same
gradients. The last line is JSON.
"""

import argparse
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_steps import QUANTISED, WAYS, ask_of
from broker.model_catalog import catalog as catalogue
from trainer.contract.checkpoint_format import Progress
from trainer.memtrace import tracer as memtrace
from trainer.memtrace.probe import Probe
from trainer.training import determinism as exact
from trainer.training.divergence import StepDecision

WARM = 3
CASES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("meta-llama/Llama-3.2-1B", WAYS[1]),
    ("HuggingFaceTB/SmolLM2-135M", WAYS[0]),
    ("HuggingFaceTB/SmolLM2-135M", WAYS[1]),
    ("Qwen/Qwen2.5-1.5B", WAYS[0]),
    ("Qwen/Qwen2.5-1.5B", QUANTISED),
    ("mistralai/Mistral-7B-v0.1", QUANTISED),
)


def any_kernel() -> None:
    torch.use_deterministic_algorithms(False)


def warned() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def insisted() -> None:
    exact.begin()
    exact.require()


MODES: Mapping[str, Callable[[], None]] = {"any": any_kernel, "warn_only": warned, "exact": insisted}


def gradients(probe: Probe) -> list[torch.Tensor]:
    """Return the gradients of a step that updates nothing. Raises: ValueError if one is not a finite number."""
    gathered: list[torch.Tensor] = []

    def refuse(progress: Progress, loss: float, norm: float) -> StepDecision:
        gathered.extend(p.grad.clone() for p in probe.trained.parameters.values() if p.grad is not None)
        return StepDecision("skip", progress.guard, "")

    dataclasses.replace(probe.runner, judge=refuse).run(Progress())
    if not all(bool(g.isfinite().all()) for g in gathered):
        raise ValueError("a gradient is not a finite number")
    return gathered


def measured(model: str, way: Mapping[str, Any], lasts_s: float) -> dict[str, Any]:
    """Return tokens/s, peak and sameness of each mode."""
    published = catalogue.find(model)
    assert published is not None
    probe = memtrace.on_gpu(published.config, ask_of(way))
    row: dict[str, Any] = {"model": model, "way": dict(way)}
    for name, mode in MODES.items():
        mode()
        for _ in range(WARM):
            probe.run_step()
        torch.cuda.reset_peak_memory_stats()
        step_s = memtrace.timed(probe, lasts_s)
        peak = torch.cuda.max_memory_allocated()
        same = all(torch.equal(a, b) for a, b in zip(gradients(probe), gradients(probe), strict=True))
        speed = round(way["micro_batch"] * way["seq"] / step_s, 1)
        row[name] = {"tokens_per_s": speed, "step_s": round(step_s, 4), "peak_bytes": peak, "same": same}
    return row


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table("model", "way", *(f"{name}: {what}" for name in MODES for what in ("tokens/s", "same")))
    for row in rows:
        way = row["way"]
        words = f"{way['method']} {way['micro_batch']} x {way['seq']}"
        cells = [c for n in MODES for c in (f"{row[n]['tokens_per_s']:,.0f}", "yes" if row[n]["same"] else "NO")]
        table.add_row(row["model"].split("/")[-1], words, *cells)
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--lasts", type=float, default=1.0, help="seconds of the timed steps of each mode")
    parser.add_argument("--seconds", type=float, default=300, help="after which no case is begun")
    asked = parser.parse_args()
    rows, until = [], time.monotonic() + asked.seconds
    for model, way in CASES:
        if time.monotonic() > until:
            break
        rows.append(measured(model, way, asked.lasts))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    show(rows)
    same = {name: sum(row[name]["same"] for row in rows) for name in MODES}
    on = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(json.dumps({"on": on, "cases": len(rows), "same": same, "rows": rows}))


if __name__ == "__main__":
    main()

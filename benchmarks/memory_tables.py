"""Traces Whisper and Stable Diffusion's UNets for the committed tables: `python -m benchmarks.memory_tables`.

Models are traced at full depth, at three sizes, with LoRA at two ranks. Within one segment of the step every category
is linear in these. So the file holds the lines' coefficients: see `broker/estimator/memory/trace_fit.py`. `--check N`
compares N sizes off these with fresh traces, in place of writing the file. Needs the trainer's packages and diffusers;
15 minutes of one core.
"""

import argparse
import json
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from broker.estimator.memory.device_overhead import CUBLAS_WORKSPACE
from broker.estimator.memory.trace_fit import Segments, TracedStep, by_category
from broker.model_catalog import catalog as catalogue
from broker.model_catalog.trace_tables import FILE, key_of, load_of

RANKS = 16, 64
GRID = tuple(product((1, 2, 4, 8, 16, 32, 64), (0.02, 0.1, 0.5, 1.0, 4.0), (1, 16, 256)))
"""Rows, shares of the usual size, and ranks at which a segment may be the worst; others are left out of the file."""
METHODS, PRECISIONS = ("full", "lora"), ("bf16-autocast",)
LINEAR = ("activations", "logits", "temporary")
SIZES = {"whisper": ((2, 64), (2, 448), (6, 448)), "unet": ((2, 256), (2, 512), (6, 512))}


def kind_of(config: Mapping[str, Any]) -> str:
    return "unet" if "_class_name" in config else "whisper"


def models() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the models of the catalogue that have no closed form, but tables."""
    for name in catalogue.names():
        found = catalogue.find(name)
        if found and (found.config.get("model_type") == "whisper" or "_class_name" in found.config):
            yield name, found.config


def traced(config: Mapping[str, Any], key: str, rows: int, size: int, rank: int) -> dict[str, dict[str, int]]:
    """Return bytes of every segment by category. `size`: tokens to write, or pixels of a side."""
    from accelerate.state import AcceleratorState

    from trainer.memtrace import __main__ as memtrace_main
    from trainer.memtrace import tracer as memtrace

    AcceleratorState._reset_state(True)
    method, precision, checkpointing = key.split()
    words = [
        *("--config", "x", "--method", method, "--precision", precision.removesuffix("-autocast"), "--seq", str(size)),
        *("--micro-batch", str(rows), "--lora-r", str(rank), "--target-seq", str(size), f"--{checkpointing}"),
        *(("--task", "text_to_image") if kind_of(config) == "unet" else ()),
    ]
    ask = memtrace_main.options(memtrace_main.parser().parse_args(words), str(config.get("model_type")))
    return dict(memtrace.segments(config, ask))


def lines(config: Mapping[str, Any], key: str) -> Segments:
    """Return the coefficients of every segment."""
    sizes = SIZES[kind_of(config)]
    at = [(load_of(config, rows, size, RANKS[0]), traced(config, key, rows, size, RANKS[0])) for rows, size in sizes]
    if key.startswith("lora"):
        rows, size = sizes[-1]
        at.append((load_of(config, rows, size, RANKS[1]), traced(config, key, rows, size, RANKS[1])))
    return {
        name: {c: line for c in at[0][1][name] if any(line := _line(at, name, c))}
        for name in at[0][1]
        if all(name in segments for _, segments in at)
    }


def _line(at: Sequence[tuple[TracedStep, Mapping[str, Mapping[str, int]]]], name: str, category: str) -> list[float]:
    """[constant, by row, by row and size, and of each rank above 16: constant, by what a row has of all tokens]."""
    values = [segments[name].get(category, 0) for _, segments in at]
    (low, _), (wide, _), (many, _) = at[:3]
    by_size = (values[1] - values[0]) / (wide.rows * (wide.size - low.size))
    by_row = (values[2] - values[1]) / (many.rows - wide.rows) - by_size * wide.size
    line = [values[0] - low.rows * (by_row + by_size * low.size), by_row, by_size]
    if len(at) > 3:
        more = (values[3] - values[2]) / (RANKS[1] - RANKS[0])
        line += [0, more / (many.rows * many.spread)] if category in LINEAR else [more]
    return [round(x, 3) for x in line]


def pruned(config: Mapping[str, Any], found: Segments) -> Segments:
    """Return the segments that are the worst anywhere."""
    usual = SIZES[kind_of(config)][1][1]
    worst = set()
    for rows, share, rank in GRID:
        by = by_category(found, load_of(config, rows, max(1, round(usual * share)), rank))
        sums = {name: sum(bytes_by.values()) for name, bytes_by in by.items()}
        worst.add(max(sums, key=lambda name: sums[name]))
    return {name: by for name, by in found.items() if name in worst}


def checked(number: int) -> None:
    """Print the errors at sizes off the traced ones, then one JSON line."""
    from broker.sizing.estimate import estimate

    pick, every = random.Random(8), sorted(models())
    errors: dict[str, list[float]] = {}
    for i in range(number):
        name, config = every[i % len(every)]
        method, precision = pick.choice(METHODS), pick.choice(PRECISIONS)
        checkpointing, rank, rows = pick.random() < 0.5, pick.choice([4, 8, 32]), pick.choice([1, 3, 4, 5, 12])
        unet = kind_of(config) == "unet"
        size = pick.choice([320, 512, 640, 768, 1024]) if unet else pick.choice([32, 100, 200, 448])
        there = traced(config, key_of(method, precision, checkpointing), rows, size, rank)
        worst = max(sum(by.values()) for by in there.values())
        found = estimate(
            name, method=method, precision=precision, gradient_checkpointing=checkpointing, lora_r=rank,
            micro_batch=rows, resolution=size if unet else None, target_seq=None if unet else size,
        )  # fmt: skip
        error = 100 * ((found["peak_allocated_bytes"] - CUBLAS_WORKSPACE) / worst - 1)
        errors.setdefault(kind_of(config), []).append(error)
        words = f"{name} {method} {precision} {checkpointing=} {rank=} {rows=} {size=}"
        print(f"{error:+6.2f} % of {worst / 2**30:6.2f} GiB {words}", flush=True)
    flat = [abs(e) for found in errors.values() for e in found]
    document = {kind: round(max(map(abs, found)), 3) for kind, found in errors.items()}
    document |= {"median_abs_pct": round(statistics.median(flat), 3), "max_abs_pct": round(max(flat), 3)}
    print(json.dumps({"n": len(flat)} | document))


def main() -> None:
    """Write the file, or compare with it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", type=int, default=0, metavar="N")
    parser.add_argument("--only", default="", help="models whose name has this; the others stay as they are")
    args = parser.parse_args()
    if args.check:
        return checked(args.check)
    import torch
    import transformers

    path = Path(str(FILE))
    document = json.loads(path.read_text()) if path.exists() else {"models": {}}
    for name, config in models():
        if args.only not in name:
            continue
        keys = [key_of(m, p, c) for m, p, c in product(METHODS, PRECISIONS, (False, True))]
        document["models"][name] = {key: pruned(config, lines(config, key)) for key in keys}
        document["versions"] = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
        path.write_text(json.dumps(document, separators=(",", ":")).replace('"},', '"},\n') + "\n")
        print(name, path.stat().st_size, flush=True)


if __name__ == "__main__":
    main()

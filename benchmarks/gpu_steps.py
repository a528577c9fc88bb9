"""Compare memory and speed of real steps on this machine's GPU with predictions that were frozen before.

    python -m benchmarks.gpu_steps freeze PREDICTIONS.json --gpu H100-80GB   # anywhere: no GPU, no torch
    python -m benchmarks.gpu_steps measure PREDICTIONS.json     # on an idle GPU of that kind; up to 10 minutes
    python -m benchmarks.gpu_steps run                          # one case, from stdin; `measure` calls it
    python -m benchmarks.gpu_steps show PREDICTIONS.measured.json            # the measurements, as a table

Every case runs in a process of its own. The trainer's own loop takes three steps with random weights of the published
shape, then timed steps for a second and a half. The last line of `measure` and `show` is JSON. A case that
fails or runs out of memory is a row like the others, with its reason.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from broker.estimator.speed.hardware import GIB
from broker.model_catalog import catalog as catalogue
from broker.sizing.estimate import estimate
from trainer.agent.process.child import worker_defaults

CASE_TIMEOUT_S = 120
"""Seconds after which a case is aborted."""
MODELS = (
    "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-1.5B", "meta-llama/Llama-3.2-1B", "google/gemma-2-2b",
    "openai-community/gpt2", "EleutherAI/pythia-1.4b", "microsoft/phi-2", "bigcode/starcoder2-3b",
)  # fmt: skip
WAYS: tuple[Mapping[str, Any], ...] = (
    {"method": "full", "precision": "bf16-autocast", "seq": 1024, "micro_batch": 2},
    {"method": "lora", "precision": "bf16-autocast", "seq": 1024, "micro_batch": 8, "gradient_checkpointing": True},
    {"method": "lora", "precision": "fp32", "seq": 512, "micro_batch": 4, "optimizer": "adamw_foreach"},
)
QUANTISED: Mapping[str, Any] = {**WAYS[1], "method": "qlora", "micro_batch": 4}
LARGE: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("mistralai/Mistral-7B-v0.1", {"method": "lora", "precision": "bf16", "seq": 2048, "micro_batch": 2}),
    ("Qwen/Qwen3-8B", {**WAYS[1], "seq": 2048, "micro_batch": 4}),
    ("meta-llama/Llama-3.2-1B", QUANTISED),
    ("Qwen/Qwen2.5-1.5B", QUANTISED),
    ("google/gemma-2-2b", QUANTISED),
    ("mistralai/Mistral-7B-v0.1", QUANTISED),
)
KEYS = ("peak_allocated_bytes", "device_used_bytes")
SPEED = "tokens_per_s"
TIMED_S = 1.5
"""Seconds of timed steps."""


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (model, training options)."""
    for model in MODELS:
        for way in WAYS:
            yield model, dict(way)
    for model, way in LARGE:
        yield model, dict(way)


def frozen(gpu: str) -> dict[str, Any]:
    """Return all predictions for `gpu`, with their time and a digest that `measured` checks. Raises ValueError."""
    rows = []
    for model, way in cases():
        estimated = estimate(model, gpu=gpu, **way)
        speed = (SPEED, f"{SPEED}_interval", f"{SPEED}_evidence")
        kept = ("gpu", "margin_pct", "device_margin_pct", "evidence", "segment", *speed)
        rows.append({"model": model, "way": way, **{k: estimated[k] for k in (*KEYS, *kept)}})
    return {"frozen_at": datetime.now(UTC).isoformat(timespec="seconds"), "digest": digest(rows), "rows": rows}


def digest(rows: list[dict[str, Any]]) -> str:
    """Return the digest of the predictions."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def ask_of(way: Mapping[str, Any]) -> Any:
    """Return the tracer's options for a case."""
    from trainer.memtrace import __main__ as memtrace_main

    words = {"bf16-autocast": "bf16", "bf16": "bf16-pure"}
    arguments = [
        *("--config", "x", "--method", way["method"], "--precision", words.get(way["precision"], way["precision"])),
        *("--optimizer", way.get("optimizer", "adamw_fused"), "--seq", str(way["seq"])),
        *("--micro-batch", str(way["micro_batch"])),
        *(["--gradient-checkpointing"] if way.get("gradient_checkpointing") else []),
    ]
    return memtrace_main.options(memtrace_main.parser().parse_args(arguments))


def run_here(model: str, way: Mapping[str, Any]) -> dict[str, Any]:
    """Measure one case on this machine's GPU. `on` in the result: GPU and library versions."""
    import torch
    import transformers

    from trainer.memtrace import tracer as memtrace

    published = catalogue.find(model)
    assert published is not None
    found = memtrace.measure(published.config, ask_of(way), TIMED_S)
    on = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}"
    return {**found, SPEED: round(way["micro_batch"] * way["seq"] / found["step_s"], 1), "on": on}


def in_process(model: str, way: Mapping[str, Any]) -> dict[str, Any]:
    """Run a case in a process of its own; the result has `error` if there are no figures."""
    command, asked = [sys.executable, "-m", "benchmarks.gpu_steps", "run"], json.dumps([model, way])
    env = worker_defaults(dict(os.environ))
    try:
        done = subprocess.run(
            command, input=asked, capture_output=True, text=True, timeout=CASE_TIMEOUT_S, check=False, env=env
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {CASE_TIMEOUT_S} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:200]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def compared(row: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return one row of the table: errors in percent, negative if the prediction was too low."""
    if "error" in found:
        return {**row, "error": found["error"]}
    errors = {f"{key}_error_pct": round(100 * (row[key] / found[key] - 1), 2) for key in (*KEYS, SPEED)}
    margins = zip(KEYS, ("margin_pct", "device_margin_pct"), strict=True)
    beyond = [key for key, margin in margins if found[key] > row[key] * (1 + row[margin] / 100)]
    low, high = row[f"{SPEED}_interval"]
    return {
        **row,
        "measured": dict(found),
        **errors,
        "beyond_margin": beyond,
        "in_interval": low <= found[SPEED] <= high,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors of the measured rows, and the number of failed rows."""
    figures: dict[str, Any] = {"n": len(rows), "failed": sum("error" in r for r in rows)}
    good = [r for r in rows if "error" not in r]
    for key in KEYS if good else ():
        errors = [abs(r[f"{key}_error_pct"]) for r in good]
        figures[key] = {"median_abs_pct": round(statistics.median(errors), 2), "max_abs_pct": max(errors)}
        figures[key]["under_beyond_margin"] = sum(key in r["beyond_margin"] for r in good)
    for evidence in sorted({r[f"{SPEED}_evidence"] for r in good}):
        rows_of = [r for r in good if r[f"{SPEED}_evidence"] == evidence]
        errors = [abs(r[f"{SPEED}_error_pct"]) for r in rows_of]
        speed = {"n": len(errors), "median_abs_pct": round(statistics.median(errors), 2), "max_abs_pct": max(errors)}
        figures[f"{SPEED} {evidence}"] = speed | {"in_interval": sum(r["in_interval"] for r in rows_of)}
    return figures


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table("model", "way", "peak GiB", "error", "used GiB", "error", "tokens/s", "error", "interval")
    for row in rows:
        way = row["way"]
        words = f"{way['method']} {way['precision']} {way['micro_batch']} x {way['seq']}"
        words += ", checkpointing" if way.get("gradient_checkpointing") else ""
        if "error" in row:
            table.add_row(row["model"].split("/")[-1], words, row["error"])
            continue
        cells = [f(row, key) for key in KEYS for f in (gib, error)]
        inside = "in" if row["in_interval"] else "out"
        speed = [f"{row['measured'][SPEED]:,.0f}", error(row, SPEED), inside]
        table.add_row(row["model"].split("/")[-1], words, *cells, *speed)
    Console(width=150).print(table)


def gib(row: Mapping[str, Any], key: str) -> str:
    return f"{row['measured'][key] / GIB:.2f}"


def error(row: Mapping[str, Any], key: str) -> str:
    return f"{row[f'{key}_error_pct']:+.1f} %"


def measured(predictions: Path, budget_s: float) -> None:
    """Measure all cases and write the table next to the predictions. Raises ValueError for edited predictions."""
    document = json.loads(predictions.read_text())
    if digest(document["rows"]) != document["digest"]:
        raise ValueError(f"{predictions}: was changed after it was frozen; freeze the predictions again")
    rows, started = [], datetime.now(UTC)
    for row in document["rows"]:
        late = (datetime.now(UTC) - started).total_seconds() > budget_s - CASE_TIMEOUT_S / 4
        found = {"error": "no time left"} if late else in_process(row["model"], row["way"])
        rows.append(compared(row, found))
        print(f"{len(rows)} of {len(document['rows'])}: {row['model']}", file=sys.stderr, flush=True)
    show(rows)
    table = {"frozen_at": document["frozen_at"], "measured_at": started.isoformat(timespec="seconds"), "rows": rows}
    predictions.with_suffix(".measured.json").write_text(json.dumps(table, indent=1))
    print(json.dumps(summary(rows)))


def main() -> int:
    """Run the command. Return 2, with one line on stderr, if a case cannot run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("what", choices=("freeze", "measure", "run", "show"))
    parser.add_argument("predictions", type=Path, nargs="?")
    parser.add_argument(
        "--gpu", default="H100-80GB", help="GPU of the predictions, by its name in `gpubroker estimate`"
    )
    parser.add_argument("--seconds", type=float, default=570, help="time of `measure` after which no case starts")
    args = parser.parse_args()
    if args.what == "run":
        print(json.dumps(run_here(*json.load(sys.stdin))))
        return 0
    if args.predictions is None:
        parser.error("give PREDICTIONS.json")
    try:
        if args.what == "measure":
            measured(args.predictions, args.seconds)
        elif args.what == "show":
            rows = json.loads(args.predictions.read_text())["rows"]
            show(rows)
            print(json.dumps(summary(rows)))
        else:
            document = frozen(args.gpu)
            with args.predictions.open("x") as file:
                json.dump(document, file, indent=1)
    except (OSError, ValueError) as e:
        print(e, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Memory of real steps on this machine's GPU against predictions that were frozen first.

    python -m benchmarks.gpu_memory freeze PREDICTIONS.json      # anywhere: no GPU, no torch; never overwrites
    python -m benchmarks.gpu_memory measure PREDICTIONS.json     # on a GPU that nobody else uses; under 10 minutes
    python -m benchmarks.gpu_memory run                          # one case, from stdin; `measure` calls it

Every case is a process of its own: the trainer's own loop takes three steps with random weights of the published shape.
The last line of `measure` is JSON; a case that fails or runs out of memory is a row like the others, with its reason.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from broker.models import catalogue
from broker.sizing import estimate

PATIENCE_S = 120
BUDGET_S = 570
MODELS = (
    "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-1.5B", "meta-llama/Llama-3.2-1B", "google/gemma-2-2b",
    "openai-community/gpt2", "EleutherAI/pythia-1.4b", "microsoft/phi-2", "bigcode/starcoder2-3b",
)  # fmt: skip
WAYS: tuple[Mapping[str, Any], ...] = (
    {"method": "full", "precision": "bf16-autocast", "seq": 1024, "micro_batch": 2},
    {"method": "lora", "precision": "bf16-autocast", "seq": 1024, "micro_batch": 8, "gradient_checkpointing": True},
    {"method": "lora", "precision": "fp32", "seq": 512, "micro_batch": 4, "optimizer": "adamw_foreach"},
)
LARGE: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("mistralai/Mistral-7B-v0.1", {"method": "lora", "precision": "bf16", "seq": 2048, "micro_batch": 2}),
    ("Qwen/Qwen3-8B", {**WAYS[1], "seq": 2048, "micro_batch": 4}),
)
KEYS = ("peak_allocated_bytes", "device_used_bytes")


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """(model, how it is trained)."""
    for model in MODELS:
        for way in WAYS:
            yield model, dict(way)
    for model, way in LARGE:
        yield model, dict(way)


def frozen() -> dict[str, Any]:
    """All predictions, with the moment and a digest that `measure` checks."""
    rows = []
    for model, way in cases():
        found = estimate(model, **way)
        kept = ("margin_pct", "device_margin_pct", "evidence", "segment")
        rows.append({"model": model, "way": way, **{k: found[k] for k in (*KEYS, *kept)}})
    return {"frozen_at": datetime.now(UTC).isoformat(timespec="seconds"), "digest": digest(rows), "rows": rows}


def digest(rows: list[dict[str, Any]]) -> str:
    """Of the predictions as they stand."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def run_here(model: str, way: Mapping[str, Any]) -> dict[str, int]:
    """Measures one case on this machine's GPU."""
    from trainer import memtrace

    published = catalogue.find(model)
    assert published is not None
    words = {"bf16-autocast": "bf16", "bf16": "bf16-pure"}
    arguments = [
        *("--config", "x", "--method", way["method"], "--precision", words.get(way["precision"], way["precision"])),
        *("--optimizer", way.get("optimizer", "adamw_fused"), "--seq", str(way["seq"])),
        *("--micro-batch", str(way["micro_batch"])),
        *(["--gradient-checkpointing"] if way.get("gradient_checkpointing") else []),
    ]
    return memtrace.measure(published.config, memtrace._ask(memtrace._arguments().parse_args(arguments)))


def in_process(model: str, way: Mapping[str, Any]) -> dict[str, Any]:
    """The same in a process of its own; `error` where it gave no figures."""
    command = [sys.executable, "-m", "benchmarks.gpu_memory", "run"]
    try:
        done = subprocess.run(
            command, input=json.dumps([model, way]), capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {PATIENCE_S} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:200]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def compared(row: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """One row of the table: errors in percent, negative where too little was predicted."""
    if "error" in found:
        return {**row, "error": found["error"]}
    errors = {f"{key}_error_pct": round(100 * (row[key] / found[key] - 1), 2) for key in KEYS}
    margins = zip(KEYS, ("margin_pct", "device_margin_pct"), strict=True)
    beyond = [key for key, margin in margins if found[key] > row[key] * (1 + row[margin] / 100)]
    return {**row, "measured": dict(found), **errors, "beyond_margin": beyond}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the rows that were measured, and how many were not."""
    told: dict[str, Any] = {"n": len(rows), "failed": sum("error" in r for r in rows)}
    good = [r for r in rows if "error" not in r]
    for key in KEYS if good else ():
        errors = [abs(r[f"{key}_error_pct"]) for r in good]
        told[key] = {"median_abs_pct": round(statistics.median(errors), 2), "max_abs_pct": max(errors)}
        told[key]["under_beyond_margin"] = sum(key in r["beyond_margin"] for r in good)
    return told


def measured(predictions: Path) -> None:
    """Measures all cases, writes the table beside the predictions. Raises ValueError for edited predictions."""
    document = json.loads(predictions.read_text())
    if digest(document["rows"]) != document["digest"]:
        raise ValueError(f"{predictions}: was changed after it was frozen; freeze anew")
    rows, started = [], datetime.now(UTC)
    for row in document["rows"]:
        late = (datetime.now(UTC) - started).total_seconds() > BUDGET_S - PATIENCE_S / 4
        found = {"error": "no time left"} if late else in_process(row["model"], row["way"])
        rows.append(compared(row, found))
        print(json.dumps(rows[-1]), flush=True)
    table = {"frozen_at": document["frozen_at"], "measured_at": started.isoformat(timespec="seconds"), "rows": rows}
    predictions.with_suffix(".measured.json").write_text(json.dumps(table, indent=1))
    print(json.dumps(summary(rows)))


def main() -> int:
    """2 with one line on stderr for what cannot be done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("what", choices=("freeze", "measure", "run"))
    parser.add_argument("predictions", type=Path, nargs="?")
    args = parser.parse_args()
    if args.what == "run":
        print(json.dumps(run_here(*json.load(sys.stdin))))
        return 0
    if args.predictions is None:
        parser.error("give PREDICTIONS.json")
    try:
        if args.what == "measure":
            measured(args.predictions)
        else:
            with args.predictions.open("x") as file:
                json.dump(frozen(), file, indent=1)
    except (OSError, ValueError) as e:
        print(e, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

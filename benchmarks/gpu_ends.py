"""Check how a job ends if this machine's GPU is too small or partly in use: `python -m benchmarks.gpu_ends`.

Runs `python -m trainer --config` as a process on a decoder of 60 million weights and rows of 2,048 tokens, in three
cases. The first has a larger micro-batch than fits into memory. The second has `micro_batch: auto`, which asks the
tracer. In the third, another process holds a third of the memory. Each must end with the expected exit code and
message. The last line is JSON. The exit code is 1 if a case ends otherwise.
"""

import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu_resume import ROWS, build_model
from trainer.contract.documents import ExitCode

BATCH, LENGTH, STEPS = 256, 2048, 3
HOLDER = """
import sys, torch
free, total = torch.cuda.mem_get_info()
held = torch.empty(total // 3, dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


def train(folder: Path, name: str, rows: int | str) -> tuple[int, str]:
    """Return (exit code, output) of one run."""
    config = {
        "model": str(folder / "decoder"), "max_steps": STEPS, "global_batch": BATCH, "micro_batch": rows,
        "data": {"path": str(folder / "rows.jsonl"), "prompt": "{word}", "completion": "{text}", "eval_share": 0},
        "method": {"kind": "full"}, "precision": "bf16", "max_length": LENGTH, "gradient_checkpointing": False,
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    argv = [sys.executable, "-m", "trainer", "--config", str(folder / f"{name}.yaml"), "--output", str(folder / name)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=180, check=False)
    return done.returncode, done.stdout + done.stderr


def line_of(output: str, pattern: str) -> str:
    """Return the first line that matches the pattern, or an empty string."""
    return next((line.strip()[:300] for line in output.splitlines() if re.search(pattern, line)), "")


def too_many(folder: Path) -> Mapping[str, Any]:
    code, output = train(folder, "too many", BATCH)
    message = line_of(output, "GPU memory is too small")
    right = code == ExitCode.OOM and bool(message)
    return {"case": "micro-batch too large", "code": code, "message": message, "right": right}


def auto(folder: Path) -> Mapping[str, Any]:
    code, output = train(folder, "auto", "auto")
    message = line_of(output, "micro_batch auto")
    finals = [json.loads(p.read_text()) for p in (folder / "auto" / "store").rglob("final.json")]
    peak = max((final["peak_memory_bytes"] or 0 for final in finals), default=0)
    beats = [json.loads(p.read_text()) for p in (folder / "auto" / "store").rglob("heartbeats/*/*") if p.is_file()]
    gpu = {k: v for beat in beats[-1:] for k, v in beat.items() if k.startswith("gpu_")}
    right = code == ExitCode.COMPLETED and "by the tracer" in message
    row = {"case": "micro_batch: auto", "code": code, "message": message, "peak_gib": round(peak / 2**30, 1)}
    return {**row, "last_beat": gpu, "right": right}


def partly_in_use(folder: Path) -> Mapping[str, Any]:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        code, output = train(folder, "partly in use", 1)
    finally:
        holder.communicate()
    message = line_of(output, "in use by another process")
    right = code == ExitCode.INFRASTRUCTURE and bool(message)
    return {"case": "another process holds a third", "code": code, "message": message, "right": right}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="gb-") as scratch:
        folder = Path(scratch)
        build_model(folder / "decoder")
        words, draw = ROWS.read_text().split(), random.Random(1)
        rows = [{"word": "w", "text": " ".join(draw.choices(words, k=LENGTH))} for _ in range(BATCH)]
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        results = [case(folder) for case in (too_many, auto, partly_in_use)]
    for row in results:
        print(f"{row['case']}: {'right' if row['right'] else 'WRONG'}, exit {row['code']}: {row['message']}")
    print(json.dumps({"cases": len(results), "right": sum(row["right"] for row in results), "rows": results}))
    sys.exit(any(not row["right"] for row in results))


if __name__ == "__main__":
    main()

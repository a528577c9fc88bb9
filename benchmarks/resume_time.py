"""Measure a start, and the time from a kill to new work.

`python -m benchmarks.resume_time` runs `python -m trainer` on SmolLM2-135M's shape, LoRA and full. `start_s` is the
time from the start of the process to the end of its first optimizer step. The process group is then SIGKILLed after a
save and started again at once. `resume_s` is the time from the kill to the end of the first step that was not finished
before the kill. Restore and repeated steps are included.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.save_stall import MODEL, PROMPT, build_model

STEP = re.compile(r"\bstep (\d+)/")


def config(model: Path, method: str) -> dict[str, Any]:
    """Return the trainer's configuration, with more steps than the benchmark lets run."""
    return {
        "model": str(model.resolve()),
        "data": {
            "path": str(PROMPT.resolve()),
            "prompt": "Define {word}:",
            "completion": " {definition}",
            "eval_share": 0,
        },
        "method": {"kind": method},
        "max_steps": 1000,
        "max_length": 64,
        "global_batch": 4,
    }


class Run:
    """One start of the trainer; its output is read line by line."""

    def __init__(self, spec: Path, output: Path) -> None:
        argv = [sys.executable, "-m", "trainer", "--config", str(spec), "--output", str(output), "--save-every", "1"]
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def until(self, pattern: str) -> re.Match[str]:
        """Read the output up to a line that matches the pattern, and return the match."""
        assert self.process.stdout is not None
        read: list[str] = []
        for line in self.process.stdout:
            read.append(line)
            if match := re.search(pattern, line):
                return match
        raise SystemExit("".join(read[-20:]))

    def kill(self) -> float:
        """Send SIGKILL to the process group, and return the time."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return time.monotonic()


def measure(model: Path, method: str) -> dict[str, float]:
    """Measure one start, one kill and one resume."""
    with tempfile.TemporaryDirectory(prefix="gpubroker-bench-") as scratch:
        spec, output = Path(scratch) / "train.yaml", Path(scratch) / "out"
        spec.write_text(yaml.safe_dump(config(model, method)))
        first = Run(spec, output)
        first.until(STEP.pattern)
        start_s = time.monotonic() - first.began
        first.until("committed")
        done = int(first.until(STEP.pattern)[1])
        killed = first.kill()
        second = Run(spec, output)
        restored = int(second.until(r"resumed at step (\d+)")[1])
        while int(second.until(STEP.pattern)[1]) <= done:
            pass
        resume_s = time.monotonic() - killed
        second.kill()
        return {"start_s": start_s, "resume_s": resume_s, "steps_again": done - restored}


def main() -> None:
    """Print the median of each figure by method; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpubroker-model-") as scratch:
        model = MODEL
        if not model.exists():
            model = Path(scratch)
            build_model(model)
        figures: dict[str, Any] = {"rounds": arguments.rounds}
        for method in ("lora", "full"):
            rounds = [measure(model, method) for _ in range(arguments.rounds)]
            figures[method] = {name: round(statistics.median(r[name] for r in rounds), 2) for name in rounds[0]}
            print(method, rounds, flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

"""Compare speed, peak memory and start-up of this trainer, HF Trainer and TRL's SFTTrainer on the same job.

In `python -m benchmarks.trainer_speed` all three train each case in turn, `--rounds` times, as processes of their own.
All have the same model, rows, micro-batch, precision, LoRA and versions of torch, transformers, peft and
accelerate. Speed counts tokens without padding, from the end of the first step to the end of the last.
Start-up is the time to the end of the first step, the peak the largest resident memory of a process. The other trainers
are installed into `.demo/peers` if that folder is missing (1.2 GB); `--peers PYTHON` names an environment with them. If
SmolLM2 is not in `.demo/models`, the model has its shape and random weights. `--scale` is for GPUs.
"""

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.save_stall import build_model

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".demo" / "peers"
MODEL = ROOT / ".demo" / "models" / "smollm2-135m-instruct"
DATA = ROOT / "examples" / "devils-dictionary.csv"
SAME = ("torch", "transformers", "peft", "accelerate")
STEP = re.compile(r"step (\d+)/\d+.*?(?:tokens (\d+))?$")
TRAINERS = ("gpubroker", "hf", "trl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Training job that all three trainers run."""

    name: str
    method: str
    precision: str = "fp32"
    packing: bool = False
    micro_batch: int = 4
    global_batch: int = 8
    rows: int | None = None
    """Rows of a step of this trainer under packing: as many tokens as the packed sequences of the others."""
    max_length: int = 192
    steps: int = 20


CASES = (
    Case(name="lora", method="lora"),
    Case(name="lora bf16", method="lora", precision="bf16"),
    Case(name="full", method="full"),
    Case(name="lora packed", method="lora", packing=True, micro_batch=1, rows=54, max_length=512),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Figures of one process."""

    tokens_per_s: float
    peak_mb: float
    first_step_s: float


def install_peers() -> Path:
    """Return the python of the environment that holds the other trainers."""
    python = PEERS / ".venv" / "bin" / "python"
    if not python.exists():
        PEERS.mkdir(parents=True, exist_ok=True)
        pinned = [f"{name}=={version(name).split('+')[0]}" for name in SAME]
        wanted = ["-r", str(ROOT / "benchmarks" / "peers" / "requirements.txt"), *pinned, "jinja2"]
        subprocess.run([sys.executable, str(ROOT / ".ci" / "install.py"), *wanted], cwd=PEERS, check=True)
    return python


def ours(case: Case, folder: Path, model: Path) -> list[str]:
    """Write the configuration, and return the command that trains the case with this trainer."""
    config = {
        "model": str(model),
        "data": {
            "path": str(DATA),
            "prompt": "Word: {word} ({part_of_speech})\nDefinition:",
            "completion": " {definition}",
            "eval_share": 0,
        },
        "method": {"kind": case.method},
        "max_steps": case.steps,
        "global_batch": case.rows or case.global_batch,
        "micro_batch": case.micro_batch,
        "max_length": case.max_length,
        "packing": case.packing,
        "precision": case.precision,
        "gradient_checkpointing": False,
    }
    (folder / "train.yaml").write_text(yaml.safe_dump(config))
    return [sys.executable, "-m", "trainer", "--config", str(folder / "train.yaml"), "--output", str(folder / "out")]


def theirs(kind: str, case: Case, folder: Path, model: Path, python: Path) -> list[str]:
    """Write the case, and return the command that trains it with another trainer."""
    document = asdict(case) | {"model": str(model), "data": str(DATA)}
    (folder / "case.json").write_text(json.dumps(document))
    return [str(python), str(ROOT / "benchmarks" / "peers" / "train.py"), kind, str(folder / "case.json")]


def run(kind: str, case: Case, model: Path, python: Path) -> Run:
    """Train once. Raises RuntimeError with the last lines if the process fails."""
    with tempfile.TemporaryDirectory(prefix="gpubroker-speed-") as scratch:
        folder = Path(scratch)
        command = ours(case, folder, model) if kind == "gpubroker" else theirs(kind, case, folder, model, python)
        started = time.monotonic()
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment
        )
        assert child.stdout is not None
        lines: list[str] = []
        ends: list[float] = []
        tokens: list[int] = []
        for line in child.stdout:
            lines.append(line.rstrip())
            if found := STEP.search(line.rstrip()):
                ends.append(time.monotonic())
                tokens.append(int(found[2] or 0))
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode or len(ends) != case.steps:
            raise RuntimeError(f"{kind} on {case.name} ended with {child.returncode}:\n" + "\n".join(lines[-15:]))
        if kind == "gpubroker":
            metrics = next((folder / "out").rglob("metrics.jsonl")).read_text().splitlines()
            tokens = [int(json.loads(row)["tokens"]) for row in metrics]
        speed = sum(tokens[1:]) / (ends[-1] - ends[0])
        return Run(tokens_per_s=speed, peak_mb=usage.ru_maxrss / 1024, first_step_s=ends[0] - started)


def summary(runs: list[Run]) -> dict[str, float]:
    """Return the medians."""
    return {
        "tokens_per_s": round(statistics.median(r.tokens_per_s for r in runs), 1),
        "peak_mb": round(statistics.median(r.peak_mb for r in runs)),
        "first_step_s": round(statistics.median(r.first_step_s for r in runs), 2),
    }


def show(results: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print the table."""
    table = Table("case", "trainer", "tokens/s", "ours / it", "peak MB", "first step after s")
    for case, trainers in results.items():
        own = trainers["gpubroker"]["tokens_per_s"]
        for kind, found in trainers.items():
            ratio = "" if kind == "gpubroker" else f"{own / found['tokens_per_s']:.2f}x"
            table.add_row(
                case, kind, f"{found['tokens_per_s']:.0f}", ratio, f"{found['peak_mb']:.0f}", f"{found['first_step_s']}"
            )
    Console().print(table)


def scaled(case: Case, arguments: argparse.Namespace) -> Case:
    """Return the case with the requested steps and rows."""
    rows = None if case.rows is None else case.rows * arguments.scale
    micro, batch = case.micro_batch * arguments.scale, case.global_batch * arguments.scale
    return replace(case, steps=arguments.steps, micro_batch=micro, global_batch=batch, rows=rows)


@contextlib.contextmanager
def model_folder() -> Iterator[Path]:
    """Yield SmolLM2's folder from the demo, or a model of its shape."""
    if MODEL.exists():
        yield MODEL
        return
    with tempfile.TemporaryDirectory(prefix="gpubroker-model-") as scratch:
        build_model(Path(scratch))
        yield Path(scratch)


def measure(
    cases: list[Case], runs: dict[str, dict[str, list[Run]]], model: Path, python: Path, rounds: int, until: float
) -> None:
    """Measure all rounds of all cases, by all trainers in turn."""
    for number in range(rounds):
        for case in cases:
            if number and time.monotonic() > until:
                continue
            for kind in (k for k in TRAINERS if not (case.packing and k == "hf")):  # HF Trainer does not pack
                print(f"{case.name}: {kind}, round {number + 1} of {rounds}", file=sys.stderr, flush=True)
                runs[case.name].setdefault(kind, []).append(run(kind, case, model, python))


def main() -> None:
    """Print the table; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=6.0, help="time after which no second or later round starts")
    parser.add_argument("--case", action="append", choices=[c.name for c in CASES], help="may be repeated")
    parser.add_argument("--peers", type=Path, help="Python of an environment with the other trainers")
    parser.add_argument("--scale", type=int, default=1, help="factor of the micro-batch and the global batch")
    arguments = parser.parse_args()
    python = arguments.peers or install_peers()
    until = time.monotonic() + 60 * arguments.minutes
    cases = [scaled(c, arguments) for c in CASES if not arguments.case or c.name in arguments.case]
    runs: dict[str, dict[str, list[Run]]] = {case.name: {} for case in cases}
    with model_folder() as model:
        measure(cases, runs, model, python, arguments.rounds, until)
    results = {name: {kind: summary(found) for kind, found in kinds.items()} for name, kinds in runs.items()}
    show(results)
    rounds = {name: len(kinds["gpubroker"]) for name, kinds in runs.items()}
    figures = {"rounds": rounds, "steps": arguments.steps, "scale": arguments.scale, "cases": results}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

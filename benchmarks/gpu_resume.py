"""Comparison of killed and undisturbed runs on this machine's GPU: `python -m benchmarks.gpu_resume`.

`python -m trainer --config` runs as a process: decoders of 60 million weights by every method, and the tiny jobs of
every task (`tests.trainer.support.tiny_jobs`). Each job runs once undisturbed. Then it is SIGKILLed `--kills` times,
each a few steps after a checkpoint, and started again until it is done. Exact: every loss, rate and norm, and every
file of the complete checkpoint (weights, moments, results), equals the undisturbed run's bit for bit. Three jobs share
the GPU; with more, the check of the machine refuses it. The last line is JSON.
"""

import argparse
import csv
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from tests.trainer.support import tiny_jobs

ROWS = Path(__file__).resolve().parent.parent / "examples" / "devils-dictionary.csv"
STEPS, TINY_STEPS = 60, 150
EVAL_EVERY = 25
SAVE_EVERY_S = 1
TIMEOUT_S = 240
LIVES = 8
STEP = re.compile(r"\bstep \d+/")
ROW = ("step", "loss", "lr", "grad_norm")
COMPARED = (".safetensors", "eval.json", "samples.json")
LORA, FULL, QLORA = {"kind": "lora", "dropout": 0.1}, {"kind": "full"}, {"kind": "qlora", "dropout": 0.1}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "lora bf16": {"method": LORA, "precision": "bf16"},
    "full bf16": {"method": FULL, "precision": "bf16"},
    "full fp16": {"method": FULL, "precision": "fp16"},
    "full fp32": {"method": FULL, "precision": "fp32"},
    "full tf32": {"method": FULL, "precision": "fp32", "tf32": True},
    "full packed": {"method": FULL, "precision": "bf16", "packing": True, "max_length": 256, "micro_batch": 2},
    "full again": {"method": FULL, "precision": "bf16", "gradient_checkpointing": True},
    "full eager": {"method": FULL, "precision": "bf16", "attention": "eager"},
    "full compiled": {"method": FULL, "precision": "bf16", "compile": True},
    "full fp8": {"method": FULL, "precision": "bf16", "fp8": True},
    "full 8-bit states": {"method": FULL, "precision": "bf16", "optim": {"name": "adamw_8bit"}},
    "qlora nf4": {"method": QLORA, "precision": "bf16"},
    "qlora int8": {"method": {**QLORA, "bits": 8}, "precision": "bf16"},
}


@dataclass(kw_only=True)
class JobOutput:
    """Output and files of a job's processes."""

    rows: list[list[Any]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    kills: int = 0
    resumed: int = 0
    notices: set[str] = field(default_factory=set)
    error: str = ""


def build_model(folder: Path) -> Path:
    """Write a decoder of 60 million random weights whose tokens are the words of the data."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = sorted({word for row in csv.reader(ROWS.open()) for text in row for word in text.split()})
    known = {word: number for number, word in enumerate(["<eos>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(1)
    shape = LlamaConfig(
        vocab_size=(len(known) + 63) // 64 * 64, hidden_size=768, intermediate_size=2048, num_hidden_layers=6,
        num_attention_heads=12, num_key_value_heads=4, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    return folder


def jobs(folder: Path, only: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """(name, its configuration's file) of the jobs whose names begin so."""
    model = build_model(folder / "decoder")
    data = {"path": str(ROWS), "prompt": "Define {word}:", "completion": " {definition}", "eval_share": 0.05}
    for name, way in ((n, w) for n, w in WAYS.items() if n.startswith(only)):
        fields = {"max_length": 128, "micro_batch": 4, **way, "model": str(model), "data": data}
        yield name, written(folder / f"{name}.yaml", {"global_batch": 16, "max_steps": STEPS, **fields})
    for name, kind in ((f"tiny {n}", k) for n, k in tiny_jobs.KINDS.items() if f"tiny {n}".startswith(only)):
        home = folder / name
        train = tiny_jobs.train(kind, home / "model")
        (home / train.data.path).write_bytes(tiny_jobs.data(kind))
        fields = train.model_dump(mode="json", exclude_none=True)
        yield name, written(home / "train.yaml", {**fields, "max_steps": TINY_STEPS})


def written(file: Path, fields: Mapping[str, Any]) -> Path:
    file.write_text(yaml.safe_dump({**fields, "eval_every_steps": EVAL_EVERY}))
    return file


def run_once(config: Path, output: Path, told: JobOutput, kill_after: int | None) -> bool:
    """Run one start; return True if it came to its end. `kill_after`: steps after its first checkpoint."""
    argv = [sys.executable, "-m", "trainer", "--config", str(config), "--output", str(output)]
    process = subprocess.Popen(
        [*argv, "--save-every", str(SAVE_EVERY_S)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    read: list[str] = []
    saved, after = False, 0
    for line in process.stdout:
        read.append(line.rstrip())
        saved = saved or "committed" in line
        after += saved and bool(STEP.search(line))
        told.resumed += "resumed at step" in line
        if "notice: " in line:
            told.notices.add(line.split("notice: ")[1].strip())
        if kill_after is not None and after > kill_after:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            told.kills += 1
            return False
    if process.wait() != 0:
        told.error = f"ended with {process.returncode}: " + " | ".join(read[-4:])[-400:]
    return True


def run(config: Path, output: Path, kills: int, draw: random.Random) -> JobOutput:
    """Run all lives of one run."""
    job_output, until = JobOutput(), time.monotonic() + TIMEOUT_S
    for _ in range(LIVES):
        if time.monotonic() > until:
            job_output.error = job_output.error or f"not done after {TIMEOUT_S} s"
            return job_output
        if run_once(config, output, job_output, draw.randrange(12) if job_output.kills < kills else None):
            break
    if not job_output.error:
        job_output.rows, job_output.files = left(output)
    return job_output


def left(output: Path) -> tuple[list[list[Any]], dict[str, str]]:
    """(steps, sha256 by file) of the complete checkpoint."""
    manifests = [json.loads(p.read_text()) for p in (output / "store").rglob("manifest.json")]
    done = next(m for m in manifests if m["complete"])
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [[row[k] for k in ROW] for row in rows if "grad_norm" in row]
    return steps, {f["path"]: f["sha256"] for f in done["files"] if f["path"].endswith(COMPARED)}


def difference(calm: JobOutput, killed: JobOutput) -> str:
    """Return the first difference as text; empty: there is none."""
    if calm.error or killed.error:
        return calm.error or killed.error
    if len(calm.rows) != len(killed.rows) or not calm.files:
        return f"{len(killed.rows)} steps for {len(calm.rows)}, {len(calm.files)} files"
    step = next((f"{b} for {a}" for a, b in zip(calm.rows, killed.rows, strict=True) if a != b), "")
    wrong = sorted(n for n in {*calm.files, *killed.files} if calm.files.get(n) != killed.files.get(n))
    return " ".join(filter(None, (step, ", ".join(wrong))))


def judged(name: str, config: Path, folder: Path, kills: int) -> dict[str, Any]:
    """Return the row of one job."""
    started = time.monotonic()
    calm = run(config, folder / f"{name} calm", 0, random.Random())
    killed = run(config, folder / f"{name} killed", kills, random.Random(name))
    wrong = difference(calm, killed)
    notices = sorted(calm.notices | killed.notices)
    took = round(time.monotonic() - started)
    found = {"job": name, "exact": not wrong, "kills": killed.kills, "resumed": killed.resumed, "wrong": wrong}
    print(f"{name}: {wrong or 'exact'}, {killed.kills} kills, {took} s", file=sys.stderr, flush=True)
    return {**found, "steps": len(killed.rows), "notices": notices, "seconds": took}


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table("job", "steps", "kills", "resumed", "exact", "said")
    for row in rows:
        said = "; ".join(filter(None, (row["wrong"], *row["notices"])))
        cells = [str(row[k]) for k in ("steps", "kills", "resumed")]
        table.add_row(row["job"], *cells, "yes" if row["exact"] else "NO", said)
    Console(width=150).print(table)


def main() -> None:
    """Run all jobs. Return 1 if a run is not exact."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=3, help="jobs that share the GPU")
    parser.add_argument("--only", action="append", help="jobs whose name begins so; again for several")
    parser.add_argument("--rows", type=Path, help="write every job's row there, as JSON")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gb-") as scratch, ThreadPoolExecutor(asked.at_once) as pool:
        folder = Path(scratch)
        wanted = list(jobs(folder, tuple(asked.only or [""])))
        rows = list(pool.map(lambda job: judged(job[0], job[1], folder, asked.kills), wanted))
    show(rows)
    if asked.rows is not None:
        asked.rows.write_text(json.dumps(rows, indent=1))
    total = {key: sum(row[key] for row in rows) for key in ("exact", "kills", "resumed")}
    print(json.dumps({"jobs": len(rows), **total}))
    sys.exit(any(not row["exact"] for row in rows))


if __name__ == "__main__":
    main()

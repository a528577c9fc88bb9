"""`micro_batch: auto` without a broker's plan: the most rows that fit the GPU according to the tracer."""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.contract.train import FullConfig, LoraConfig, TrainConfig

GIB = 1 << 30
CONTEXT = int(0.75 * GIB)
"""Bytes of the driver and its libraries, which the tracer does not count."""
SHARE = 0.9
"""Usable share of the memory; the rest is reserved for fragmentation."""
LIMIT_S = 300.0
TASKS = ("causal_lm", "text_classification", "token_classification", "seq2seq")
"""Tasks that the tracer supports."""
Trace = Callable[[Sequence[str]], str]
"""Function that returns the tracer's output for its arguments. Raises OSError, subprocess.SubprocessError."""


def traced(argv: Sequence[str]) -> str:
    """Run the tracer in a separate process, because this one never imports torch."""
    command = [sys.executable, "-m", "trainer.memtrace", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout


def sized(train: TrainConfig, *, memory: int, processes: int, trace: Trace = traced) -> tuple[TrainConfig, str]:
    """Return the configuration with rows that fit `memory` bytes of a GPU, and a message.

    The configuration is unchanged if it has a number, or if none can be determined.
    """
    if train.micro_batch != "auto":
        return train, ""
    max_rows = math.ceil(train.global_batch_rows / processes)
    try:
        peak_1, peak_2 = (_peak(train, rows, processes, trace) for rows in (1, 2))
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as e:
        why = "is not traced" if isinstance(e, ValueError) else f"cannot be traced ({type(e).__name__})"
        return train, f"micro_batch auto: {train.micro_batch_rows}, since the memory of such a job {why}"
    rows = fitting(peak_1, peak_2, memory=memory, max_rows=max_rows, batch=train.global_batch_rows)
    peak = (peak_1 + (rows - 1) * (peak_2 - peak_1) + CONTEXT) / GIB
    message = f"micro_batch auto: {rows}, by the tracer {peak:.1f} GiB of the GPU's {memory / GIB:.1f}"
    return train.model_copy(update={"micro_batch": rows}), message


def fitting(peak_1: int, peak_2: int, *, memory: int, max_rows: int, batch: int) -> int:
    """Return the largest divisor of the batch up to `max_rows` that fits; 1 if none fits.

    `peak_1`, `peak_2`: peak bytes of one and two rows.
    """
    budget = memory * SHARE - CONTEXT
    sizes = [rows for rows in range(max_rows, 0, -1) if batch % rows == 0]
    return next((rows for rows in sizes if peak_1 + (rows - 1) * (peak_2 - peak_1) <= budget), 1)


def _peak(train: TrainConfig, rows: int, processes: int, trace: Trace) -> int:
    """Return the peak bytes of each process, including DDP's buckets with several processes.

    Raises: ValueError if the tracer does not support the configuration.
    """
    method = train.method
    plain = isinstance(method, FullConfig) or (isinstance(method, LoraConfig) and not method.dora)
    if not plain or train.optim.name != "adamw" or train.task not in TASKS or train.precision not in ("auto", "bf16"):
        raise ValueError
    attention = "eager" if train.attention == "eager" else "sdpa"
    argv = ["--task", train.task, "--method", method.kind, "--seq", str(train.max_length)]
    argv += ["--micro-batch", str(rows), "--global-batch", str(2 * rows * processes), "--attention", attention]
    argv += ["--gpus", str(processes), "--sharding", "ddp"] if processes > 1 else []
    argv += ["--gradient-checkpointing"] if train.recomputes else []
    if isinstance(method, LoraConfig):
        names = method.targets if isinstance(method.targets, str) else ",".join(method.targets)
        argv += ["--lora-r", str(method.r), "--lora-dropout", str(method.dropout), "--lora-targets", names]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(_config(train.model, train.revision))
        return int(json.loads(trace(["--config", str(config), *argv]))["peak_allocated_bytes"])


def _config(model: str, revision: str | None) -> str:
    """Return the text of the model's config.json. Raises: OSError."""
    if Path(model).is_dir():
        return (Path(model) / "config.json").read_text()
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json", revision=revision)).read_text()
    except (
        Exception
    ) as e:  # raised by huggingface_hub or the client below it; training reads the file again and reports the reason
        raise OSError(str(e)) from e

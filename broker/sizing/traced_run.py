"""Exact tracer for `estimate --exact`, as a separate process with the trainer's packages."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from typing import Any, NamedTuple

from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import family_spec
from broker.estimator.architecture.lora_targets import ALL_LINEAR
from broker.estimator.memory.device_overhead import Estimate, with_overhead
from broker.estimator.memory.estimate import (
    CATEGORIES,
    EstimateOptions,
    InvalidEstimate,
    adapted_modules,
    check_numbers,
)
from broker.estimator.memory.evidence import FORMULA, Tier
from broker.estimator.memory.simulator.types import StepPeak
from broker.model_catalog.config_defaults import kind_of
from broker.model_catalog.uncounted import uncounted

TRACE_TIMEOUT_S = 300
EXACT_PRECISIONS = {
    "bf16-autocast": "bf16", "fp16-autocast": "fp16", "fp32": "fp32", "bf16": "bf16-pure", "fp16": "fp16-pure",
}  # fmt: skip
MAMBA = frozenset({"bamba", "falcon_h1", "falcon_mamba", "mamba", "mamba2", "zamba", "zamba2"})
TRACED_TASKS = ("causal_lm", "text_classification", "token_classification", "seq2seq", "image_classification")
"""Tasks that the tracer supports, by the architecture or by its own option."""


def _targets(shape: ModelShape | None, ask: EstimateOptions) -> str:
    """Return the LoRA targets in the tracer's terms. `shape`: None for a model that has no shape."""
    if ask.method == "full":
        return ALL_LINEAR
    if shape is None and not isinstance(ask.targets, tuple):
        raise InvalidEstimate(f"--exact traces no pattern for such a model ({ask.targets}); give names of its modules")
    if shape is None:
        return ",".join(ask.targets)
    adapted, names = adapted_modules(shape, ask.targets)[0], family_spec(shape).names
    if ask.targets == (ALL_LINEAR,):
        return ALL_LINEAR
    if isinstance(ask.targets, tuple):  # the tracer uses peft itself
        return ",".join(ask.targets)
    if not adapted <= names.keys():
        raise InvalidEstimate(
            f"--exact traces no pattern that matches embeddings or the head ({ask.targets}); give names"
        )
    return ",".join(sorted({names[role] for role in adapted}))


def _installed() -> str | None:
    """Return the version of transformers that the tracer would run, or None if it is not installed."""
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None


def _check(ask: EstimateOptions, task: str | None) -> None:
    """Raise InvalidEstimate for a step that the trainer itself does not run."""
    installed = _installed()
    for wrong, message in (
        (ask.method not in ("full", "lora", "qlora"), f"--method {ask.method}"),
        (ask.optimizer not in ("adamw_fused", "adamw_foreach"), f"--optimizer {ask.optimizer}"),
        (ask.transformers not in (None, installed), f"--stack but {installed or 'an installed one'}"),
        (ask.norms != "float32", f"--norms {ask.norms}"),
        (ask.recipe != "gpubroker", f"--recipe {ask.recipe}"),
        (ask.sharding not in ("none", "ddp", "fsdp"), f"--sharding {ask.sharding}"),
        (ask.sharding == "fsdp" and ask.method == "qlora", "--sharding fsdp over a base of 4 bits"),
        (ask.sharding == "fsdp" and ask.transformers is not None, "--stack, whose --sharding fsdp is FSDP 1"),
        (ask.offload, "--offload"),
        (ask.attention != "sdpa", f"--attention {ask.attention}"),
        (task not in (None, *TRACED_TASKS), f"--task {task}"),
    ):
        if wrong:
            raise InvalidEstimate(
                f"--exact traces the trainer's own step, alone or by DDP or FSDP 2: no {message}; leave out --exact"
            )


class TracedModel(NamedTuple):
    """A model that no closed form counts: its estimate by the trace alone, and the trace."""

    family: str
    estimate: Estimate
    trace: dict[str, Any]


def alone(config: Mapping[str, Any], ask: EstimateOptions, task: str | None) -> TracedModel | None:
    """Return a model that only the tracer can estimate; None for any other model. Raise InvalidEstimate."""
    gap = uncounted(config)
    if gap is None or not gap.traceable:
        return None
    check_numbers(ask)
    traced = trace(config, None, ask, task, count=True)
    by = {category: traced["by_category"].get(category, 0) for category in CATEGORIES}
    peak = StepPeak(segments={traced["segment"]: by}, trained=traced["trainable"])
    notes: tuple[str, ...] = ("no closed form counts this model; its trace was not compared with a GPU",)
    if str(config.get("model_type")) in MAMBA:
        notes = (*notes, "Mamba layers without mamba-ssm's kernels; traces of small models were 10 to 26 % too high")
    tier: tuple[Tier, str, float] = "formula", "a trace of the model's own code", FORMULA
    counted = with_overhead(traced["parameters"], peak, tier, notes, several=ask.gpus > 1)
    return TracedModel(str(config.get("model_type")), counted, traced)


def trace(
    config: Mapping[str, Any], shape: ModelShape | None, ask: EstimateOptions, task: str | None, *, count: bool = False
) -> dict[str, Any]:
    """Return the exact tracer's result for the trainer's own step. Raise InvalidEstimate for any other step.

    `count`: the result has `parameters` and `trainable` too.
    """
    _check(ask, task)
    a_step = ask.rows * ask.gpus * (2 if ask.accumulated else 1)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({**config, **({"model_type": kind_of(config)} if kind_of(config) else {})}, file)
        file.flush()
        command = [
            *(sys.executable, "-m", "trainer.memtrace", "--config", file.name, "--method", ask.method),
            *("--optimizer", ask.optimizer, "--precision", EXACT_PRECISIONS[ask.precision], "--seq", str(ask.length)),
            *(["--target-seq", str(ask.target)] if ask.target else []),
            *("--micro-batch", str(ask.rows), "--global-batch", str(a_step)),
            *(["--gpus", str(ask.gpus), "--sharding", ask.sharding] if ask.gpus > 1 else []),
            *("--lora-r", str(ask.rank), "--lora-dropout", str(ask.dropout), "--lora-targets", _targets(shape, ask)),
            *(["--task", task] if task in TRACED_TASKS[1:] else []),
            *(["--count"] if count else []),
            "--gradient-checkpointing" if ask.checkpointing else "--no-gradient-checkpointing",
        ]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=TRACE_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise InvalidEstimate(f"--exact: the tracer took longer than {TRACE_TIMEOUT_S} s") from None
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["the tracer failed"])[-1]
        raise InvalidEstimate(
            f"--exact: {last.replace(file.name, 'the config')} (it needs `pip install 'gpubroker[trainer]'`)"
        )
    traced: dict[str, Any] = json.loads(result.stdout)
    return traced

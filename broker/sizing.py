"""What a fine-tune takes, from a model's config alone: `gpubroker estimate` and `broker.estimate()`.

Needs no daemon, no network, no GPU and no torch; the exact tracer runs as a process of its own, with the trainer's
packages.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from broker import tabled
from broker.decide import estimate as sizes
from broker.decide.hardware import TABLE, Hardware, matches, nearest
from broker.decide.lora_targets import ALL_LINEAR
from broker.decide.memory_builds import build_of
from broker.decide.roofline import ideal, terms
from broker.decide.scaling import run_of, unmeasured
from broker.decide.throughput import spread_of
from broker.domain.errors import InvalidInput
from broker.domain.gpus import gpu_name
from broker.domain.workload import ModelShape, Parallelism, Plan
from broker.models import catalogue, traced
from broker.models.checked import check_kind
from broker.models.defaults import filled
from broker.models.shape import headed_shape, shape_of, text_of, written_shape
from broker.models.tasks import built_for, task_shape
from trainer.contract.train import TaskName

TRACE_PATIENCE_S = 300
EXACT_PRECISIONS = {
    "bf16-autocast": "bf16", "fp16-autocast": "fp16", "fp32": "fp32", "bf16": "bf16-pure", "fp16": "fp16-pure",
}  # fmt: skip


TASKS: tuple[str, ...] = get_args(TaskName)
PAIRED = frozenset({"dpo", "reward_model"})
"""Tasks of which each row is two sequences."""
TRACED_TASKS = ("causal_lm", "text_classification", "token_classification", "seq2seq", "image_classification")
"""What the tracer knows, by the architecture or by its own option."""


class BadAsk(ValueError):
    """What was asked cannot be estimated; the message is one line that says why."""


def _read(path: Path) -> str:
    file = path / "config.json" if path.is_dir() else path
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "is no text"
        raise BadAsk(f"{file}: {reason}; give a transformers config.json") from None


def config_of(model: str | None, config: str | Path | Mapping[str, Any] | None) -> tuple[str, Mapping[str, Any]]:
    """(name, config) of a model of the bundled catalogue, a folder, a file, or of JSON itself. Raises BadAsk."""
    if (model is None) == (config is None):
        raise BadAsk("give either a MODEL of the catalogue or --config CONFIG.json")
    if isinstance(config, Mapping):
        return "config", config
    if config is None:
        found = catalogue.find(str(model))
        if found is not None:
            return str(model), found.config
        if not Path(str(model)).is_dir():
            raise BadAsk(f"{model}: not in the bundled catalogue, and no folder; give --config CONFIG.json")
        config = Path(str(model))
    inline = isinstance(config, str) and config.lstrip().startswith("{")
    where, text = ("--config", str(config)) if inline else (str(config), _read(Path(config)))
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise BadAsk(f"{where}: is not JSON ({e})") from None
    if not isinstance(parsed, dict):
        raise BadAsk(f"{where}: is not a JSON object")
    return where, parsed


def model_shape(name: str, config: Mapping[str, Any], task: str | None = None) -> ModelShape:
    """`task`: None for that of the config's class, else what the architecture is mostly trained for. Raises BadAsk."""
    if task is not None and task not in TASKS:
        raise BadAsk(f"--task {task}: not one of {', '.join(TASKS)}")
    try:
        for part in (config, text_of(config)):
            check_kind(part)
    except ValueError as e:
        raise BadAsk(f"config.json of {name!r} has {e}") from None
    try:
        task = task or built_for(config)
        if task is not None:
            found = task_shape(name, config, task)
            if found is None:
                raise BadAsk(
                    f"--task {task}: nobody knows what {config.get('model_type')} takes; a job's first step tells"
                )
            return found
        return headed_shape(name, config) or written_shape(name, config) or shape_of(name, config, mixtures=True)
    except InvalidInput as e:
        raise BadAsk("; ".join(p.message for p in e.problems)) from None


def hardware_of(gpu: str | None) -> Hardware | None:
    if gpu is None:
        return None
    asked = gpu_name(gpu)
    found = next((h for name, h in TABLE.items() if h.gpu and matches(asked, name)), None)
    if found is None:
        known = ", ".join(name for name, h in TABLE.items() if h.gpu)
        near = "".join(f", the nearest is {name}" for name in nearest(asked))
        raise BadAsk(f"--gpu {' '.join(gpu.split())[:100]}: not known{near}; known are {known}")
    return found


def _speed(
    shape: ModelShape, ask: sizes.Ask, hardware: Hardware | None, task: str | None
) -> tuple[float | None, list[float] | None, str]:
    """(tokens/s of all GPUs, its interval, why there is none or what it rests on)."""
    if hardware is None:
        return None, None, "no --gpu was given"
    if (why := unmeasured(ask)) is not None:
        return None, None, why
    if ask.sharding in ("hybrid", "tensor") or ask.offload or ask.nodes > 1:
        return None, None, "no basis: several machines, hybrid and tensor sharding and offload are not timed here"
    way: Mapping[sizes.Sharding, Parallelism] = {"none": "single", "ddp": "ddp", "fsdp": "fsdp"}
    plan = Plan(
        parallelism=way[ask.sharding], devices=ask.gpus, micro_batch=ask.rows, gradient_checkpointing=ask.checkpointing
    )
    target = (ask.target or ask.length) if shape.decoder_layers else 0
    run = replace(run_of(shape, ask, plan, ask.length, written=target), reference=task == "dpo")
    rate = ask.rows * ask.gpus * (ask.length + target) / terms(ideal(run, hardware)).total
    spread, evidence = spread_of(run, hardware)
    basis = f"roofline; {evidence}"
    return round(rate, 1), [round(rate / spread, 1), round(rate * spread, 1)], basis


def _targets(shape: ModelShape | None, ask: sizes.Ask) -> str:
    """Those that match something, in the tracer's words. `shape`: None where tables tell of the model."""
    if shape is None or ask.method == "full":
        return "all-linear"
    adapted, names = sizes.adapted_modules(shape, ask.targets)[0], build_of(shape).names
    if ask.targets == (ALL_LINEAR,):
        return ALL_LINEAR
    if isinstance(ask.targets, tuple):  # the tracer has peft itself
        return ",".join(ask.targets)
    if not adapted <= names.keys():
        raise BadAsk(f"--exact traces no pattern that matches embeddings or the head ({ask.targets}); give names")
    return ",".join(sorted({names[role] for role in adapted}))


def _trace(config: Mapping[str, Any], shape: ModelShape | None, ask: sizes.Ask, task: str | None) -> dict[str, Any]:
    """The exact tracer's answer for the trainer's own step. Raises BadAsk for any other step."""
    for wrong, what in (
        (ask.method not in ("full", "lora"), f"--method {ask.method}"),
        (ask.optimizer not in ("adamw_fused", "adamw_foreach"), f"--optimizer {ask.optimizer}"),
        (ask.transformers is not None, "--stack"),
        (ask.gpus > 1, f"--gpus {ask.gpus}"),
        (ask.attention != "sdpa", f"--attention {ask.attention}"),
        (task not in (None, *TRACED_TASKS), f"--task {task}"),
    ):
        if wrong:
            raise BadAsk(f"--exact traces the trainer's own step on one GPU, which knows no {what}; leave out --exact")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(dict(config), file)
        file.flush()
        command = [
            *(sys.executable, "-m", "trainer.memtrace", "--config", file.name, "--method", ask.method),
            *("--optimizer", ask.optimizer, "--precision", EXACT_PRECISIONS[ask.precision], "--seq", str(ask.length)),
            *(["--target-seq", str(ask.target)] if ask.target else []),
            *("--micro-batch", str(ask.rows), "--global-batch", str(ask.rows * (2 if ask.accumulated else 1))),
            *("--lora-r", str(ask.rank), "--lora-dropout", str(ask.dropout), "--lora-targets", _targets(shape, ask)),
            *(["--task", task] if task in TRACED_TASKS[1:] else []),
            "--gradient-checkpointing" if ask.checkpointing else "--no-gradient-checkpointing",
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TRACE_PATIENCE_S, check=False)
        except subprocess.TimeoutExpired:
            raise BadAsk(f"--exact: the tracer took longer than {TRACE_PATIENCE_S} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["the tracer failed"])[-1]
        raise BadAsk(f"--exact: {last.replace(file.name, 'the config')} (it needs `pip install 'gpubroker[trainer]'`)")
    traced: dict[str, Any] = json.loads(done.stdout)
    return traced


def _said_of(task: str | None, rows: int) -> Iterator[str]:
    """What is to be known of a task's figures."""
    if task in PAIRED:
        yield f"{task}: each of {rows // 2} rows is two sequences"


def estimate(
    model: str | None = None,
    *,
    config: str | Path | Mapping[str, Any] | None = None,
    task: str | None = None,
    method: str = "lora",
    optimizer: str = "adamw_fused",
    precision: str = "bf16-autocast",
    seq: int = 2048,
    target_seq: int | None = None,
    resolution: int | None = None,
    micro_batch: int = 1,
    accumulate: bool = False,
    gpus: int = 1,
    nodes: int = 1,
    offload: bool = False,
    sharding: str | None = None,
    gradient_checkpointing: bool = False,
    lora_r: int = 16,
    lora_targets: str = "all-linear",
    lora_dropout: float = 0.05,
    trainable_parameters: int | None = None,
    attention: str = "sdpa",
    norms: str = "float32",
    stack: str | None = None,
    exact: bool = False,
    gpu: str | None = None,
) -> dict[str, Any]:
    """Peak memory of one GPU, bytes by category, and tokens/s of all. Raises BadAsk (a ValueError) with one line.

    `model`: of the bundled catalogue; `config`: a file, a folder, JSON, or a mapping. `stack`: `transformers=4.48.1`
    for that version's own loss in place of the trainer's. `task`: of the trainer. `sharding`: by default ddp on
    several GPUs. `target_seq`: what an encoder-decoder writes, `seq` being what it reads; `resolution`: pixels of a
    side of a UNet's images.
    """
    name, given = config_of(model, config)
    ask = sizes.Ask(
        method=method,  # type: ignore[arg-type]  # checked there, with one line that names the choices
        optimizer=optimizer,
        precision=precision,  # type: ignore[arg-type]
        length=seq,
        target=target_seq,
        rows=micro_batch * (2 if task in PAIRED else 1),
        accumulated=accumulate,
        gpus=gpus,
        nodes=nodes,
        offload=offload,
        sharding=sharding or ("ddp" if gpus > 1 else "none"),  # type: ignore[arg-type]
        checkpointing=gradient_checkpointing,
        rank=lora_r,
        targets=targets_of(lora_targets),
        dropout=lora_dropout,
        trainable=trainable_parameters,
        attention=attention,  # type: ignore[arg-type]
        norms=norms,  # type: ignore[arg-type]
        transformers=_version(stack),
    )
    try:
        return _answer(name, given, ask, task, resolution, hardware_of(gpu), exact=exact)
    except sizes.Unanswerable as e:
        raise BadAsk(str(e)) from None


def targets_of(said: str) -> tuple[str, ...] | str:
    """Names with commas between, or one regular expression, which is what has other signs in it."""
    names = tuple(name.strip() for name in said.split(",") if name.strip())
    if all(re.fullmatch(r"[\w.-]+", name) for name in names):
        return (ALL_LINEAR,) if len(names) == 1 and names[0].lower() == ALL_LINEAR else names
    return said.strip()


def _version(stack: str | None) -> str | None:
    """That of transformers. Raises BadAsk."""
    package, _, version = (stack or "").partition("=")
    if stack is not None and (package != "transformers" or not version):
        raise BadAsk(f"--stack {stack}: write transformers=VERSION, for example transformers=4.48.1")
    return version or None


def _answer(
    name: str,
    given: Mapping[str, Any],
    ask: sizes.Ask,
    task: str | None,
    resolution: int | None,
    hardware: Hardware | None,
    *,
    exact: bool,
) -> dict[str, Any]:
    """Raises BadAsk, Unanswerable."""
    if (kind := traced.kind_of(given)) is not None:
        ask = tabled.sized(given, ask, resolution)
        found = tabled.estimate(given, ask)
        return _document(
            name, kind, found, hardware, tabled.NO_SPEED, _trace(given, None, ask, task) if exact else None
        )
    shape = model_shape(name, given, task)
    task, read = task or built_for(given), task is None
    tabled.refuse_resolution(shape.family, resolution)
    found = sizes.estimate(shape, ask)
    by_class = [f"task {task}, by the config's architectures"] if read and task else []
    said = *found.notes, *by_class, *_taken(given, shape), *_said_of(task, ask.rows)
    found, speed = replace(found, notes=said), _speed(shape, ask, hardware, task)
    return _document(name, shape.family, found, hardware, speed, _trace(given, shape, ask, task) if exact else None)


def _taken(given: Mapping[str, Any], shape: ModelShape) -> Iterator[str]:
    """What was read otherwise than the config says it, in words."""
    lacking = filled(text_of(given))[1]
    if lacking:
        yield f"the config lacks {', '.join(lacking)}: {shape.family}'s defaults are taken"
    others = [name for name in given if name in ("vision_config", "audio_config", "speech_config") and given[name]]
    if others:
        yield f"{given.get('model_type')} is estimated without its {' and '.join(others)}: the language model alone"


def _document(
    name: str,
    family: str,
    found: sizes.Estimate,
    hardware: Hardware | None,
    speed: tuple[float | None, list[float] | None, str],
    traced: Mapping[str, Any] | None,
) -> dict[str, Any]:
    by, segment, peak = dict(found.by_category), found.segment, found.peak_allocated
    tier, evidence, margin = str(found.tier), found.evidence, found.margin
    if traced is not None:
        by = {**dict.fromkeys(by, 0), **traced["by_category"], "context": found.context}
        by["temporary"] += sizes.CUBLAS_WORKSPACE
        peak, segment = traced["peak_allocated_bytes"] + sizes.CUBLAS_WORKSPACE, traced["segment"]
        versions = " ".join(f"{k} {v}" for k, v in traced["versions"].items())
        tier, evidence, margin = "exact", f"a trace of the model's own code: {versions}", min(margin, 0.05)
    used = peak + found.context
    return {
        "model": name,
        "family": family,
        "parameters": found.parameters,
        "trainable_parameters": found.trainable,
        "peak_allocated_bytes": peak,
        "device_used_bytes": used,
        "by_category": by,
        "segment": segment,
        "evidence": tier,
        "evidence_detail": evidence,
        "margin_pct": round(100 * margin, 1),
        "device_margin_pct": round(100 * found.device_margin, 1),
        "notes": list(found.notes),
        "tokens_per_s": speed[0],
        "tokens_per_s_interval": speed[1],
        "tokens_per_s_basis": speed[2],
        "gpu": hardware.name if hardware else None,
        "gpu_memory_bytes": hardware.memory_bytes if hardware else None,
        # under pressure the allocator gives back what it only caches, so that does not count
        "fits": peak * (1 + margin) + sizes.CONTEXT <= hardware.memory_bytes if hardware else None,
    }

"""Estimates of a fine-tune from a model's config: `gpubroker estimate` and `broker.estimate()`.

Needs no daemon, network, GPU or torch. The exact tracer runs as a separate process with the trainer's packages.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, InstanceOf, ValidationError

from broker.domain.errors import InvalidInput
from broker.domain.gpu_names import marketed_gb
from broker.domain.workload import ModelShape, Parallelism, Plan
from broker.estimator.architecture.lora_targets import ALL_LINEAR
from broker.estimator.memory import estimate as memory_estimate
from broker.estimator.memory.device_overhead import CONTEXT, Estimate
from broker.estimator.memory.estimate import EstimateOptions, InvalidEstimate
from broker.estimator.memory.evidence import exact_margin
from broker.estimator.planning.scaling import run_of, unmeasured
from broker.estimator.speed.cards import KNOWN, candidates, nearest, no_speed
from broker.estimator.speed.hardware import Hardware
from broker.estimator.speed.throughput import Speed, for_other_code, speed
from broker.estimator.workload import REFERENCE_PASSES
from broker.model_catalog import catalog, trace_tables
from broker.model_catalog.config_defaults import SAME_CODE, filled
from broker.model_catalog.config_validation import check_kind
from broker.model_catalog.decoder_shape import headed_shape, shape_of, written_shape
from broker.model_catalog.task_shape import built_for, task_shape
from broker.model_catalog.uncounted import text_of
from broker.sizing import traced_run, traced_tables
from broker.sizing.estimate_result import EstimateResult
from broker.sizing.fitting import fitting_changes, would_fit
from broker.sizing.hf_aliases import optimizer_of, stack_of, unquantised
from trainer.contract.architectures import NEEDS_LORA, REFERENCED, is_mixture
from trainer.contract.data_config import TaskName

TASKS: tuple[str, ...] = get_args(TaskName)
PAIRED = frozenset({"dpo", "orpo", "reward_model"})
"""Tasks in which each row is two sequences."""


class EstimateError(ValueError):
    """The request cannot be estimated; the message is one line that says why."""


class UnknownGpu(EstimateError):
    """No table has the GPU: its speed and whether a job fits on it are unknown."""


def _config_text(path: Path) -> str:
    file = path / "config.json" if path.is_dir() else path
    try:
        return file.read_text(encoding="utf-8-sig")  # editors on Windows write a byte order mark
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "is not text"
        raise EstimateError(f"{file}: {reason}; give a transformers config.json") from None


def config_of(model: str | None, config: str | Path | Mapping[str, Any] | None) -> tuple[str, Mapping[str, Any]]:
    """Return (name, config) of a catalogue model, a folder, a file, or JSON itself. Raise EstimateError."""
    model, config = model or None, None if config == "" else config
    if (model is None) == (config is None):
        raise EstimateError("give either a MODEL of the catalogue or --config CONFIG.json")
    if isinstance(config, Mapping):
        return "config", config
    if config is None:
        published = catalog.find(str(model))
        if published is not None:
            return str(model), published.config
        if not Path(str(model)).is_dir():
            resembling = catalog.resembling(str(model))
            fix = f"did you mean {' or '.join(resembling)}? Otherwise give" if resembling else "give"
            raise EstimateError(f"{model}: not in the bundled catalogue, and not a folder; {fix} --config CONFIG.json")
        config = Path(str(model))
    inline = isinstance(config, str) and config.lstrip().startswith("{")
    where, text = ("--config", str(config)) if inline else (str(config), _config_text(Path(config)))
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise EstimateError(f"{where}: is not JSON ({e})") from None
    if not isinstance(parsed, dict):
        raise EstimateError(f"{where}: is not a JSON object")
    return where, parsed


def model_shape(name: str, config: Mapping[str, Any], task: str | None = None) -> ModelShape:
    """Return the shape; `task` None means the task of the config's class. Raise EstimateError."""
    if task is not None and task not in TASKS:
        raise EstimateError(f"--task {task}: not one of {', '.join(TASKS)}")
    try:
        for part in (config, text_of(config)):
            check_kind(part)
    except ValueError as e:
        raise EstimateError(f"config.json of {name!r} has {e}") from None
    try:
        task = task or built_for(config)
        if task is not None:
            shape = task_shape(name, config, task)
            if shape is None:
                raise EstimateError(
                    f"--task {task}: no memory model for {config.get('model_type')}; a job's first step measures it"
                )
            return shape
        return headed_shape(name, config) or written_shape(name, config) or shape_of(name, config, mixtures=True)
    except InvalidInput as e:
        raise EstimateError("; ".join(p.message for p in e.problems)) from None


def hardware_of(gpu: str | None) -> Hardware | None:
    """Return the first known GPU that the name may mean. Raise UnknownGpu."""
    if gpu is None:
        return None
    gpu_names, option = candidates(gpu), f"--gpu {' '.join(gpu.split())[:100]}"
    if not gpu_names or not gpu_names[0].gpu:
        known_gpus = ", ".join(name for name, h in KNOWN.items() if h.gpu)
        hint = "".join(f", the nearest is {name}" for name in nearest(" ".join(gpu.lower().split())))
        raise UnknownGpu(f"{option}: not known{hint}; known are {known_gpus}")
    return gpu_names[0]


def _known_hardware(gpu: str | None) -> tuple[Hardware | None, str | None]:
    """Return the GPU, and why its speed is unknown if it is unknown itself."""
    try:
        return hardware_of(gpu), None
    except UnknownGpu as e:
        return None, str(e)


def _variant_notes(gpu: str | None) -> Iterator[str]:
    """Yield a note on the assumed variant if the name may mean GPUs of different memory."""
    gpu_names = candidates(gpu) if gpu else ()
    if len({h.memory_bytes for h in gpu_names}) > 1:
        first, *others = (f"{h.name} ({marketed_gb(h.name, h.memory_bytes)} GB)" for h in gpu_names)
        yield f"--gpu {gpu}: assumed to be {first}; it could also be {', '.join(others)}"


def _speed(shape: ModelShape, ask: EstimateOptions, hardware: Hardware | None, task: str | None) -> Speed | str:
    """Return the speed of all GPUs, or the reason why there is none."""
    if hardware is None:
        return "no --gpu was given"
    if (why := unmeasured(ask)) is not None:
        return why
    if (why := no_speed(hardware, ask.precision)) is not None:
        return f"no basis: {hardware.name}: {why}"
    layout: Parallelism = "fsdp" if ask.sharding == "fsdp" else "hybrid" if ask.sharding == "hybrid" else "ddp"
    plan = Plan(
        parallelism=layout if ask.gpus > 1 else "single",
        devices=ask.gpus,
        micro_batch=ask.rows,
        accumulation=2 if ask.accumulated else 1,
        gradient_checkpointing=ask.checkpointing,
    )
    target = (ask.target or ask.length) if shape.decoder_layers else 0
    run = run_of(shape, ask, plan, ask.length, ask.nodes, generated_tokens=target)
    return for_other_code(speed(replace(run, reference=REFERENCE_PASSES.get(task or "", 0)), hardware))


def _task_notes(task: str | None, rows: int) -> Iterator[str]:
    """Yield notes on the task's figures."""
    if task in PAIRED:
        yield f"{task}: each of {rows // 2} rows is two sequences"


def estimate(
    model: str | None = None, *, config: str | Path | Mapping[str, Any] | None = None, task: str | None = None,
    method: str = "lora", optimizer: str = "adamw_fused", precision: str = "bf16-autocast", seq: int = 2048,
    target_seq: int | None = None, resolution: int | None = None, micro_batch: int = 1, accumulate: bool = False,
    gpus: int = 1, nodes: int = 1, offload: bool = False, sharding: str | None = None,
    gradient_checkpointing: bool = False, lora_r: int = 16, lora_targets: str = "all-linear",
    lora_dropout: float = 0.05, trainable_parameters: int | None = None, attention: str = "sdpa",
    norms: str = "float32", stack: str | None = None, recipe: str = "gpubroker", exact: bool = False,
    gpu: str | None = None, fit: bool = False,
) -> EstimateResult:  # fmt: skip
    """Return the peak memory of one GPU by category and tokens/s of all GPUs, as a dict that prints in GiB.

    Raise EstimateError.

    `model`: a model of the bundled catalogue. `config`: a file, a folder, JSON, or a mapping. `optimizer`: also by the
    names of transformers. `stack`: `transformers=4.48.1` for that version's own loss in place of the trainer's; other
    packages after commas. `task`: a task of the trainer. `sharding`: by default ddp on several GPUs. `seq`: tokens that
    the model reads. `target_seq`: tokens that an encoder-decoder generates. `resolution`: pixels of a side of a UNet's
    images.
    """
    return estimate_document(EstimateRequest.checked(locals()))


class EstimateRequest(BaseModel):
    """Arguments of `estimate`, checked by type; `estimate` documents their meaning."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", protected_namespaces=())

    model: str | None
    config: str | Path | InstanceOf[Mapping[str, Any]] | None
    task: str | None
    method: str
    optimizer: str
    precision: str
    seq: int
    target_seq: int | None
    resolution: int | None
    micro_batch: int
    accumulate: bool
    gpus: int
    nodes: int
    offload: bool
    sharding: str | None
    gradient_checkpointing: bool
    lora_r: int
    lora_targets: str
    lora_dropout: float
    trainable_parameters: int | None
    attention: str
    norms: str
    stack: str | None
    recipe: str
    exact: bool
    gpu: str | None
    fit: bool

    @classmethod
    def checked(cls, arguments: Mapping[str, Any]) -> "EstimateRequest":
        """Return the request. Raise EstimateError for an argument of another type."""
        try:
            return cls.model_validate(arguments)
        except ValidationError as e:
            name = str(e.errors()[0]["loc"][0])
            value, kind = arguments[name], get_type_hints(cls)[name]
            kinds = [get_origin(k) or k for k in get_args(kind) or (kind,)]
            accepted = " or ".join(k.__name__ for k in kinds if k is not NoneType)
            raise EstimateError(
                f"{name} {repr(value)[:100]}: is of the type {type(value).__name__}; give {accepted}"
            ) from None

    def options(self, optimizer: str, version: str | None) -> EstimateOptions:
        """Return the options of the memory estimate for the optimizer and version of transformers."""
        # `memory_estimate.check` refuses unknown choices in one line that names the known ones.
        choices: Any = {
            "method": self.method,
            "precision": self.precision,
            "sharding": self.sharding or ("ddp" if self.gpus > 1 else "none"),
            "attention": self.attention,
            "norms": self.norms,
            "recipe": self.recipe,
        }
        return EstimateOptions(
            **choices, optimizer=optimizer, length=self.seq, target=self.target_seq, accumulated=self.accumulate,
            gpus=self.gpus, rows=self.micro_batch * (2 if self.task in PAIRED else 1), nodes=self.nodes,
            offload=self.offload, rank=self.lora_r, checkpointing=self.gradient_checkpointing,
            targets=targets_of(self.lora_targets), dropout=self.lora_dropout, trainable=self.trainable_parameters,
            transformers=version,
        )  # fmt: skip


def estimate_document(request: EstimateRequest) -> EstimateResult:
    """Return the document of the estimate. Raise EstimateError."""
    name, config_json = config_of(request.model, request.config)
    config_json, config_notes = unquantised(config_json, request.method)
    optimizer, optimizer_notes = optimizer_of(request.optimizer)
    try:
        version, stack_notes = stack_of(request.stack)
        ask = request.options(optimizer, version)
        hardware, unknown = _known_hardware(request.gpu)
        if request.fit and hardware is None:
            raise EstimateError(f"--fit: {unknown or 'give --gpu, for example --gpu L40S'}")
        document = _document_of_config(name, config_json, ask, request, hardware)
    except InvalidEstimate as e:
        raise EstimateError(str(e)) from None
    if unknown is not None:
        document["tokens_per_s_basis"] = unknown
    document["recipe"] = request.recipe
    document["notes"] += [*config_notes, *optimizer_notes, *stack_notes, *_variant_notes(request.gpu)]
    return EstimateResult(document)


def targets_of(text: str) -> tuple[str, ...] | str:
    """Split names at commas; a text with a character that no name has is one regular expression."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if all(re.fullmatch(r"[\w.-]+", name) for name in names):
        return (ALL_LINEAR,) if len(names) == 1 and names[0].lower() == ALL_LINEAR else names
    return text.strip()


def _document_of_config(
    name: str,
    config_json: Mapping[str, Any],
    ask: EstimateOptions,
    request: EstimateRequest,
    hardware: Hardware | None,
) -> dict[str, Any]:
    """Return the document of the estimate. Raise EstimateError or InvalidEstimate."""
    task = request.task
    if (kind := trace_tables.kind_of(config_json)) is not None:
        if ask.recipe != "gpubroker":
            raise EstimateError(f"--recipe {ask.recipe}: known for decoder language models only; leave it out")
        ask = traced_tables.sized(config_json, ask, request.resolution)
        result = traced_tables.estimate(config_json, ask)
        trace = traced_run.trace(config_json, None, ask, task) if request.exact else None
        return _document(name, kind, result, hardware, traced_tables.NO_SPEED, trace)
    memory_estimate.check_experts(ask, mixture=is_mixture(config_json))
    if request.exact and (alone := traced_run.alone(config_json, ask, task or built_for(config_json))) is not None:
        return _document(name, alone.family, alone.estimate, hardware, traced_tables.NO_SPEED, alone.trace)
    shape = model_shape(name, config_json, task)
    task, is_inferred = task or built_for(config_json), task is None
    traced_tables.refuse_resolution(shape.family, request.resolution)
    if task in REFERENCED and ask.method == "full":
        raise EstimateError(f"--method full: {task} {NEEDS_LORA}")
    result = memory_estimate.estimate(shape, ask)
    if task in {*PAIRED, *REFERENCED}:
        row = "a row as two sequences" if task in PAIRED else "as causal_lm"
        result = memory_estimate.by_formula(result, f"{shape.family} by {task}: {row}, by formula, not traced")
    by_class = [f"task {task}, by the config's architectures"] if is_inferred and task else []
    links_note = [f"assumed: {links(hardware, ask.gpus // ask.nodes)}"] if hardware and ask.nodes > 1 else []
    notes = *result.notes, *by_class, *_config_notes(config_json, shape), *_task_notes(task, ask.rows), *links_note
    result, step_speed = replace(result, notes=notes), _speed(shape, ask, hardware, task)
    trace = traced_run.trace(config_json, shape, ask, task) if request.exact else None
    document = _document(name, shape.family, result, hardware, step_speed, trace)
    if hardware is not None and document["fits"] is False:
        document["would_fit"] = would_fit(shape, ask, hardware)
        document["ways_to_fit"] = fitting_changes(shape, ask, hardware, sequences_per_row=2 if task in PAIRED else 1)
    return document


def links(hardware: Hardware, gpus_per_node: int) -> str:
    """Return the assumed links of machines with `gpus_per_node` GPUs, in words."""
    return (
        f"machines of {gpus_per_node} GPUs; within them {hardware.link / 1e9:.0f} GB/s a GPU and direction, "
        f"between them {hardware.network / 1e9:.1f} GB/s a machine"
    )


def _config_notes(config_json: Mapping[str, Any], shape: ModelShape) -> Iterator[str]:
    """Yield notes on what was read differently from the config."""
    text = text_of(config_json)
    missing = filled(text)[1]
    if missing:
        yield f"the config lacks {', '.join(missing)}: {text['model_type']}'s defaults are used"
    if text.get("model_type") in SAME_CODE:
        yield f"{text['model_type']} is estimated as {shape.family}, whose code it shares"
    if shape.tower is not None:
        yield f"{config_json.get('model_type')}: rows of text; its vision tower is held in memory and not trained"


def speed_fields(step_speed: Speed | str) -> dict[str, Any]:
    """Return the fields of a speed in a document; a string is the reason why there is none."""
    if isinstance(step_speed, str):
        nulls = dict.fromkeys(("tokens_per_s", "tokens_per_s_interval", "tokens_per_s_evidence"))
        return {**nulls, "tokens_per_s_basis": step_speed}
    return {
        "tokens_per_s": round(step_speed.tokens_per_s, 1),
        "tokens_per_s_interval": [round(rate, 1) for rate in step_speed.interval],
        "tokens_per_s_evidence": step_speed.tier,
        "tokens_per_s_basis": step_speed.evidence,
    }


def _document(
    name: str,
    family: str,
    result: Estimate,
    hardware: Hardware | None,
    step_speed: Speed | str,
    traced: Mapping[str, Any] | None,
) -> dict[str, Any]:
    categories, segment, peak = dict(result.by_category), result.segment, result.peak_allocated
    tier, evidence, margin = str(result.tier), result.evidence, result.margin
    additional = result.device_margin - result.margin
    if traced is not None:
        categories = {**dict.fromkeys(categories, 0), **traced["by_category"], "context": result.context}
        categories["temporary"] += result.workspace
        peak, segment = traced["peak_allocated_bytes"] + result.workspace, traced["segment"]
        versions = " ".join(f"{k} {v}" for k, v in traced["versions"].items())
        tier, evidence, margin = "exact", f"a trace of the model's own code: {versions}", exact_margin(family, margin)
    return {
        "model": name,
        "family": family,
        "parameters": result.parameters,
        "trainable_parameters": result.trainable,
        "peak_allocated_bytes": peak,
        "device_used_bytes": peak + result.context,
        "by_category": categories,
        "segment": segment,
        "evidence": tier,
        "evidence_detail": evidence,
        "margin_pct": round(100 * margin, 1),
        "device_margin_pct": round(100 * (margin + additional), 1),
        "notes": list(result.notes),
        **speed_fields(step_speed),
        "gpu": hardware.name if hardware else None,
        "gpu_memory_bytes": hardware.memory_bytes if hardware else None,
        # under memory pressure the allocator returns its cached memory, so that does not count
        "fits": peak * (1 + margin) + CONTEXT <= hardware.memory_bytes if hardware else None,
        "would_fit": None,
        "ways_to_fit": [],
    }

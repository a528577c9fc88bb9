"""`gpubroker estimate`: memory and speed of a fine-tune, offline and without a daemon."""

from collections.abc import Mapping
from inspect import Parameter, Signature, signature
from typing import Annotated, Any

import typer

from broker.cli.core.command import Json, command
from broker.cli.core.exit_codes import BadInput, JobFailed
from broker.cli.core.output import Output
from broker.cli.views import what_if as what_if_view
from broker.cli.views.what_if import PlotFile, WhatIf
from broker.estimator.memory.estimate import (
    ATTENTIONS,
    METHODS,
    NORMS,
    OPTIMIZERS,
    PRECISIONS,
    SHARDINGS,
    EstimateOptions,
)
from broker.estimator.memory.recipes import RECIPES
from broker.sizing.estimate import TASKS, EstimateError, speed_fields, targets_of
from broker.sizing.estimate import estimate as run_estimate
from broker.sizing.estimate_result import EstimateResult
from broker.sizing.hf_aliases import optimizer_of
from broker.sizing.what_if import what_if as scaling_table

DOES_NOT_FIT = "does not fit"
"""Reason for which no speed is shown."""


def _of(words: tuple[str, ...]) -> str:
    return "|".join(words)


def _option(kind: Any, metavar: str | None = None, help: str | None = None, *names: str) -> Any:
    return Annotated[kind, typer.Option(*names, metavar=metavar, help=help)]


OPTIONS: Mapping[str, Any] = {
    "model": Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A Hub id in the bundled catalogue, or a local folder.")
    ],
    "config": _option(str | None, "CONFIG.json", "A transformers config.json: the file, its folder, or the JSON text."),
    "task": _option(
        str | None,
        _of(TASKS),
        "Training task. Default: the task of the config's model class.",
    ),
    "method": _option(str, _of(METHODS), "Fine-tuning method."),
    "optimizer": _option(str, _of(OPTIMIZERS), "Optimizer; names of transformers such as adamw_torch work too."),
    "precision": _option(
        str,
        _of(PRECISIONS),
        "*-autocast keeps trained weights in float32, as the trainer does; the others use a single type.",
    ),
    "seq": _option(int, None, "Tokens per sequence; for an encoder-decoder, tokens of the input."),
    "target_seq": _option(int | None, None, "Output tokens of an encoder-decoder. Default: as many as the input."),
    "resolution": _option(int | None, "PIXELS", "Image side of a UNet. Default: the size it was trained for."),
    "micro_batch": _option(int, None, "Sequences per GPU per forward pass."),
    "accumulate": _option(bool, None, "Accumulate gradients over several micro-batches."),
    "gpus": _option(int, None, "Total number of GPUs on all machines."),
    "nodes": _option(int, None, "Number of machines."),
    "offload": _option(bool, None, "Keep FSDP shards in host memory.", "--offload"),
    "sharding": _option(str | None, _of(SHARDINGS), "Parallelism. Default: none on one GPU, ddp on several."),
    "gradient_checkpointing": _option(
        bool,
        None,
        "Recompute activations in the backward pass to save memory.",
        "--gradient-checkpointing/--no-gradient-checkpointing",
    ),
    "lora_r": _option(int, None, "Rank of the LoRA adapter."),
    "lora_targets": _option(str, "NAMES", "As in peft: comma-separated module names, a pattern, or all-linear."),
    "lora_dropout": _option(float, None, "Dropout of the LoRA adapter."),
    "trainable_parameters": _option(
        int | None, "N", "Parameters of the adapter with --method adapter: IA3, VeRA, OFT, prompt tuning and so on."
    ),
    "attention": _option(str, _of(ATTENTIONS), "Attention implementation."),
    "norms": _option(
        str,
        _of(NORMS),
        "Type of the norms of a quantised base under autocast: float32 (as in TRL), or half (as loaded).",
    ),
    "stack": _option(
        list[str] | None,
        "transformers=VERSION",
        "Use the loss, attention and expert code of this version. Other packages have no effect.",
    ),
    "recipe": _option(
        str,
        _of(RECIPES),
        "Training code: how it holds weights and computes the loss. Default: the trainer of this package.",
    ),
    "exact": _option(
        bool,
        None,
        "Trace the real model code, also for several GPUs. Requires the trainer's packages.",
        "--exact",
    ),
    "gpu": _option(
        str | None, "NAME", "Estimate tokens/s and fit on this GPU: A100-80GB, L40S, or the name in nvidia-smi."
    ),
    "fit": _option(
        bool,
        None,
        "Require a known --gpu. Any run that does not fit exits with 1 and lists changes that fit.",
        "--fit",
    ),
}
"""Option of each parameter of `broker.estimate()`; names and defaults are taken from that function."""


SCALING: Mapping[str, Any] = {
    "what_if": WhatIf,
    "global_batch": _option(
        int | None, None, "With --what-if: sequences per step. Default: --micro-batch times the largest GPU count."
    ),
    "rows": _option(int | None, None, "With --what-if: rows of the data set, to compute hours and dollars."),
    "usd_per_gpu_hour": _option(float | None, None, "With --what-if: price of one GPU hour in dollars."),
    "plot": PlotFile,
}
"""Options of the scaling table; all are unset by default."""
PLANNED = (
    "resolution", "task", "accumulate", "gpus", "nodes", "offload", "sharding", "gradient_checkpointing",
    "trainable_parameters", "stack", "recipe", "exact",
    "fit",
)  # fmt: skip
"""Options that a scaling table chooses for each number of GPUs, or does not use."""


async def _estimate(*, as_json: bool, **options: Any) -> None:
    """Estimate GPU memory and throughput of a fine-tune. Works offline: needs no daemon, GPU or weights."""
    out = Output(as_json=as_json)
    scaling = {name: options.pop(name) for name in SCALING}
    options["stack"] = ",".join(options["stack"]) if options["stack"] else None
    try:
        if scaling["what_if"] is not None:
            plot = scaling.pop("plot")
            return what_if_view.show(out, _scaling_table(options, **scaling), plot)
        what_if_view.check_unused(**scaling)
        result = run_estimate(**options)
    except EstimateError as e:
        raise BadInput(str(e)) from None
    if is_too_large := result["fits"] is False:
        result.update(speed_fields(DOES_NOT_FIT))
    out.document(result)
    _show(out, result)
    if is_too_large:
        raise JobFailed(DOES_NOT_FIT, is_in_document=True)


def _scaling_table(
    given: Mapping[str, Any],
    *,
    what_if: str,
    global_batch: int | None,
    rows: int | None,
    usd_per_gpu_hour: float | None,
) -> dict[str, Any]:
    """Return the scaling table. Raises EstimateError."""
    for name in PLANNED:
        if given[name] != signature(run_estimate).parameters[name].default:
            raise EstimateError(f"--{name.replace('_', '-')}: not used with --what-if {what_if}; omit it")
    options = EstimateOptions(
        method=given["method"],
        optimizer=optimizer_of(given["optimizer"])[0],
        precision=given["precision"],
        length=given["seq"],
        target=given["target_seq"],
        rows=given["micro_batch"],
        rank=given["lora_r"],
        targets=targets_of(given["lora_targets"]),
        dropout=given["lora_dropout"],
        attention=given["attention"],
        norms=given["norms"],
    )
    return scaling_table(
        what_if, model=given["model"], config=given["config"], gpu=given["gpu"], ask=options, global_batch=global_batch,
        rows=rows, usd_per_gpu_hour=usd_per_gpu_hour,
    )  # fmt: skip


def _signature() -> Signature:
    """Return the signature of the command, from which typer builds its options."""
    estimate_options = [
        parameter.replace(annotation=OPTIONS[parameter.name], kind=Parameter.KEYWORD_ONLY)
        for parameter in signature(run_estimate).parameters.values()
    ]
    scaling_options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=option) for name, option in SCALING.items()
    ]
    as_json = Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=Json)
    return Signature([*estimate_options, *scaling_options, as_json])


_estimate.__signature__ = _signature()  # type: ignore[attr-defined]
_estimate.__annotations__ = {name: parameter.annotation for name, parameter in _signature().parameters.items()}
estimate = command(_estimate)


def _show(out: Output, result: EstimateResult) -> None:
    for note in result["notes"]:
        out.print(f"note: {note}")
    if not out.as_json:
        out.print(result.heading, *result.sizes, *result.remarks)

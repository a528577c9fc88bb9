"""`gpubroker estimate`: memory and speed of a fine-tune, offline and without a daemon."""

from collections.abc import Mapping
from inspect import Parameter, Signature, signature
from typing import Annotated, Any

import typer
from rich.table import Table

from broker.cli.core.command import Json, command
from broker.cli.core.exit_codes import BadInput
from broker.cli.core.output import Output
from broker.cli.views import what_if as whatifview
from broker.cli.views.what_if import PlotFile, WhatIf
from broker.domain.offer import GIB
from broker.estimator.memory.estimate import (
    ATTENTIONS,
    METHODS,
    NORMS,
    OPTIMIZERS,
    PRECISIONS,
    SHARDINGS,
    EstimateOptions,
)
from broker.sizing.estimate import TASKS, EstimateError, targets_of
from broker.sizing.estimate import estimate as estimated
from broker.sizing.hf_aliases import optimizer_of
from broker.sizing.what_if import what_if as scaling_table


def _of(words: tuple[str, ...]) -> str:
    return "|".join(words)


def _option(kind: Any, metavar: str | None = None, help: str | None = None, *names: str) -> Any:
    return Annotated[kind, typer.Option(*names, metavar=metavar, help=help)]


OPTIONS: Mapping[str, Any] = {
    "model": Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A Hub id of the bundled catalogue, or a folder.")
    ],
    "config": _option(str | None, "CONFIG.json", "A transformers config.json, its folder, or the JSON."),
    "task": _option(
        str | None,
        _of(TASKS),
        "By default that of the config's class: the next token, a class of a text, a word, an image.",
    ),
    "method": _option(str, _of(METHODS)),
    "optimizer": _option(str, _of(OPTIMIZERS), "Also by transformers' names, such as adamw_torch."),
    "precision": _option(
        str, _of(PRECISIONS), "With -autocast trained weights are float32, as in the trainer; else all is of one type."
    ),
    "seq": _option(int, None, "Tokens of every row; of an encoder-decoder those that it reads."),
    "target_seq": _option(int | None, None, "Tokens that an encoder-decoder writes; by default as many as it reads."),
    "resolution": _option(int | None, "PIXELS", "Of a side of a UNet's images; by default what it was made for."),
    "micro_batch": _option(int, None, "Rows of one GPU at a time."),
    "accumulate": _option(bool, None, "A step has several micro-batches."),
    "gpus": _option(int, None, "Of all machines together."),
    "nodes": _option(int, None, "Machines that these GPUs are in."),
    "offload": _option(bool, None, "FSDP keeps its shards in the host's memory.", "--offload"),
    "sharding": _option(str | None, _of(SHARDINGS), "By default none on one GPU, ddp on several."),
    "gradient_checkpointing": _option(bool, None, None, "--gradient-checkpointing/--no-gradient-checkpointing"),
    "lora_r": _option(int),
    "lora_targets": _option(str, "NAMES", "As peft: module names with commas between, a pattern, or all-linear."),
    "lora_dropout": _option(float),
    "trainable_parameters": _option(
        int | None, "N", "Of --method adapter: IA3, VeRA, OFT, prompt tuning and the like."
    ),
    "attention": _option(str, _of(ATTENTIONS)),
    "norms": _option(
        str, _of(NORMS), "Of a 4-bit or 8-bit base under autocast: raised, as TRL has them, or as loaded."
    ),
    "stack": _option(
        list[str] | None,
        "transformers=VERSION",
        "That version's own loss, attention and experts. Others change nothing.",
    ),
    "exact": _option(
        bool, None, "Trace the model's own code, also of several GPUs; needs the trainer's packages.", "--exact"
    ),
    "gpu": _option(str | None, "NAME", "For tokens/s and whether it fits: A100-80GB, L40S, or as nvidia-smi has it."),
}
"""How each parameter of `broker.estimate()` is given here; names and defaults are that function's."""


SCALING: Mapping[str, Any] = {
    "what_if": WhatIf,
    "global_batch": _option(
        int | None, None, "Of --what-if: rows a step. By default --micro-batch for each of the most GPUs."
    ),
    "rows": _option(int | None, None, "Of --what-if: the data set's, for hours and dollars."),
    "usd_per_gpu_hour": _option(float | None, None, "Of --what-if: price of one GPU."),
    "plot": PlotFile,
}
"""What is asked of several GPUs besides; none by default."""
PLANNED = (
    "resolution", "task", "accumulate", "gpus", "nodes", "offload", "sharding", "gradient_checkpointing",
    "trainable_parameters", "stack", "exact",
)  # fmt: skip
"""Chosen anew for each number of GPUs, or of no meaning to a scaling table."""


async def _estimate(*, as_json: bool, **given: Any) -> None:
    """Say what a fine-tune takes of a GPU, by category and with the evidence. Offline: no daemon, GPU or weights."""
    out = Output(as_json=as_json)
    scaling = {name: given.pop(name) for name in SCALING}
    given["stack"] = ",".join(given["stack"]) if given["stack"] else None
    try:
        if scaling["what_if"] is not None:
            plot = scaling.pop("plot")
            return whatifview.show(out, _scaled(given, **scaling), plot)
        whatifview.without(**scaling)
        found = estimated(**given)
    except EstimateError as e:
        raise BadInput(str(e)) from None
    out.document(found)
    _show(out, found)


def _scaled(
    given: Mapping[str, Any],
    *,
    what_if: str,
    global_batch: int | None,
    rows: int | None,
    usd_per_gpu_hour: float | None,
) -> dict[str, Any]:
    """Raises EstimateError."""
    for name in PLANNED:
        if given[name] != signature(estimated).parameters[name].default:
            raise EstimateError(f"--{name.replace('_', '-')}: --what-if {what_if} does not look at it; leave it out")
    ask = EstimateOptions(
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
        what_if, model=given["model"], config=given["config"], gpu=given["gpu"], ask=ask, global_batch=global_batch,
        rows=rows, usd_per_gpu_hour=usd_per_gpu_hour,
    )  # fmt: skip


def _signature() -> Signature:
    """Of the command: typer makes its options of it."""
    asked = [
        one.replace(annotation=OPTIONS[one.name], kind=Parameter.KEYWORD_ONLY)
        for one in signature(estimated).parameters.values()
    ]
    more = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=option) for name, option in SCALING.items()
    ]
    as_json = Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=Json)
    return Signature([*asked, *more, as_json])


_estimate.__signature__ = _signature()  # type: ignore[attr-defined]
_estimate.__annotations__ = {name: one.annotation for name, one in _signature().parameters.items()}
estimate = command(_estimate)


def _show(out: Output, found: dict[str, Any]) -> None:
    for note in found["notes"]:
        out.say(f"note: {note}")
    if out.as_json:
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for category, size in found["by_category"].items():
        if size:
            words = "context and fragments" if category == "context" else category
            table.add_row(words, f"{size / GIB:.2f} GiB")
    table.add_row("peak allocated", f"{found['peak_allocated_bytes'] / GIB:.2f} GiB")
    table.add_row("nvidia-smi shows", f"{found['device_used_bytes'] / GIB:.2f} GiB")
    sizes = f"{found['parameters'] / 1e6:,.0f} M parameters, {found['trainable_parameters'] / 1e6:,.1f} M trained"
    out.say(f"{found['model']}: {found['family']}, {sizes}")
    out.say(table)
    shown = f"{found['device_margin_pct']:g} % of what nvidia-smi shows"
    out.say(f"peak in: {found['segment']}; margin {found['margin_pct']:g} %, {shown}")
    out.say(f"evidence: {found['evidence']} ({found['evidence_detail']})")
    if found["gpu"]:
        fits = "fits" if found["fits"] else "does not fit"
        out.say(f"{found['gpu']}: {fits} with that margin, of {found['gpu_memory_bytes'] / GIB:.1f} GiB")
    rate, interval = found["tokens_per_s"], found["tokens_per_s_interval"]
    if rate is None:
        return out.say(f"tokens/s: not known: {found['tokens_per_s_basis']}")
    told = f"{rate:,.0f} ({interval[0]:,.0f} – {interval[1]:,.0f})"
    out.say(f"tokens/s: {told}: {found['tokens_per_s_evidence']} ({found['tokens_per_s_basis']})")

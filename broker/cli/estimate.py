"""`gpubroker estimate`: memory and speed of a fine-tune, offline and without a daemon."""

from typing import Annotated, Any

import typer
from rich.table import Table

from broker.cli import whatifview
from broker.cli.exits import BadInput
from broker.cli.output import Output
from broker.cli.shell import Json, command
from broker.cli.whatifview import PlotFile, WhatIf
from broker.decide.estimate import ATTENTIONS, METHODS, OPTIMIZERS, PRECISIONS, SHARDINGS, Ask
from broker.domain.offer import GIB
from broker.sizing import BadAsk
from broker.sizing import estimate as estimated
from broker.whatif import what_if as scaling_table


def _of(words: tuple[str, ...]) -> str:
    return "|".join(words)


@command
async def estimate(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A Hub id of the bundled catalogue, or a folder.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(metavar="CONFIG.json", help="A transformers config.json, its folder, or the JSON."),
    ] = None,
    method: Annotated[str, typer.Option(metavar=_of(METHODS))] = "lora",
    optimizer: Annotated[str, typer.Option(metavar=_of(OPTIMIZERS))] = "adamw_fused",
    precision: Annotated[
        str,
        typer.Option(
            metavar=_of(PRECISIONS),
            help="With -autocast trained weights are float32, as in the trainer; else all is of one type.",
        ),
    ] = "bf16-autocast",
    seq: Annotated[int, typer.Option(help="Tokens of every row.")] = 2048,
    micro_batch: Annotated[int, typer.Option(help="Rows of one GPU at a time.")] = 1,
    accumulate: Annotated[bool, typer.Option(help="A step has several micro-batches.")] = False,
    gpus: Annotated[int, typer.Option(help="Of all machines together.")] = 1,
    nodes: Annotated[int, typer.Option(help="Machines that these GPUs are in.")] = 1,
    offload: Annotated[bool, typer.Option("--offload", help="FSDP keeps its shards in the host's memory.")] = False,
    sharding: Annotated[
        str | None, typer.Option(metavar=_of(SHARDINGS), help="By default none on one GPU, ddp on several.")
    ] = None,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing/--no-gradient-checkpointing")
    ] = False,
    lora_r: Annotated[int, typer.Option()] = 16,
    lora_targets: Annotated[
        str, typer.Option(metavar="NAMES", help="Module names with commas between, or all-linear.")
    ] = "all-linear",
    lora_dropout: Annotated[float, typer.Option()] = 0.05,
    trainable_parameters: Annotated[
        int | None, typer.Option(metavar="N", help="Of --method adapter: IA3, VeRA, OFT, prompt tuning and the like.")
    ] = None,
    attention: Annotated[str, typer.Option(metavar=_of(ATTENTIONS))] = "sdpa",
    stack: Annotated[
        str | None,
        typer.Option(metavar="transformers=VERSION", help="That version's own loss, not the trainer's."),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Trace the model's own code; needs the trainer's packages.")
    ] = False,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="For tokens/s and whether it fits: A100-80GB, L40S, RTX4090.")
    ] = None,
    what_if: WhatIf = None,
    global_batch: Annotated[
        int | None, typer.Option(help="Of --what-if: rows a step. By default --micro-batch for each of the most GPUs.")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Of --what-if: the data set's, for hours and dollars.")] = None,
    usd_per_gpu_hour: Annotated[float | None, typer.Option(help="Of --what-if: price of one GPU.")] = None,
    plot: PlotFile = None,
    as_json: Json = False,
) -> None:
    """Say what a fine-tune takes of a GPU, by category and with the evidence. Offline: no daemon, GPU or weights."""
    out = Output(as_json=as_json)
    if what_if is not None:
        ask = Ask(
            method=method,  # type: ignore[arg-type]  # checked with one line that names the choices
            optimizer=optimizer,
            precision=precision,  # type: ignore[arg-type]
            length=seq,
            rows=micro_batch,
            rank=lora_r,
            targets=tuple(t.strip() for t in lora_targets.split(",") if t.strip()),
            dropout=lora_dropout,
            attention=attention,  # type: ignore[arg-type]
        )
        try:
            scaled = scaling_table(
                what_if, model=model, config=config, gpu=gpu, ask=ask, global_batch=global_batch, rows=rows,
                usd_per_gpu_hour=usd_per_gpu_hour,
            )  # fmt: skip
        except BadAsk as e:
            raise BadInput(str(e)) from None
        return whatifview.show(out, scaled, plot)
    try:
        found = estimated(
            model,
            config=config,
            method=method,
            optimizer=optimizer,
            precision=precision,
            seq=seq,
            micro_batch=micro_batch,
            accumulate=accumulate,
            gpus=gpus,
            nodes=nodes,
            offload=offload,
            sharding=sharding,
            gradient_checkpointing=gradient_checkpointing,
            lora_r=lora_r,
            lora_targets=lora_targets,
            lora_dropout=lora_dropout,
            trainable_parameters=trainable_parameters,
            attention=attention,
            stack=stack,
            exact=exact,
            gpu=gpu,
        )
    except BadAsk as e:
        raise BadInput(str(e)) from None
    out.document(found)
    _show(out, found)


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
    told = f"{rate:,.0f} ({interval[0]:,.0f} – {interval[1]:,.0f})" if rate else "not known"
    out.say(f"tokens/s: {told}: {found['tokens_per_s_basis']}")

"""`gpubroker models` and `gpubroker gpus`: the bundled catalogues that offline estimates use."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from broker.cli.core.command import Json, command
from broker.cli.core.exit_codes import NotFoundExit
from broker.cli.core.output import Output
from broker.domain.gpu_names import marketed_gb
from broker.estimator.speed.cards import KNOWN, candidates
from broker.model_catalog import catalog

CONTEXT = ("max_position_embeddings", "n_positions", "max_target_positions")
"""Config fields that hold the longest supported sequence; families name it differently."""
Words = Annotated[list[str] | None, typer.Argument(metavar="[WORD]...", help="Only names that contain every word.")]


async def _models(words: Words = None, *, as_json: Json = False) -> None:
    """List the models of the bundled catalogue, which the broker can size offline."""
    out = Output(as_json=as_json)
    rows = [
        row for name in catalog.names() if _contains_words(words, str((row := _model(name))["id"]), str(row["family"]))
    ]
    _require_match(rows, words, "model", "gpubroker models lists all; for other models use estimate --config")
    out.document(rows)
    table = _table(("model", "family", "parameters", "context", "licence"), right=("parameters", "context"))
    for row in rows:
        licence = f"{row['licence']} (gated)" if row["gated"] else str(row["licence"])
        context = "" if row["context_tokens"] is None else f"{row['context_tokens']:,}"
        table.add_row(row["id"], row["family"], f"{row['parameters']:,}", context, licence)
    out.print(table, f"{len(rows)} models")


async def _gpus(words: Words = None, *, as_json: Json = False) -> None:
    """List the GPUs that estimates cover: memory, arithmetic speed and interconnect."""
    out = Output(as_json=as_json)
    gpu_names = candidates(" ".join(words or ()))
    rows = [
        asdict(gpu) for name, gpu in KNOWN.items() if gpu.gpu and (_contains_words(words, name) or gpu in gpu_names)
    ]
    _require_match(rows, words, "GPU", "gpubroker gpus lists all")
    out.document(rows)
    heads = ("GPU", "memory", "bf16", "matrix product", "fp32", "memory bandwidth", "GPU to GPU")
    table = _table(heads, right=heads[1:])
    for row in rows:
        table.add_row(
            row["name"],
            f"{marketed_gb(row['name'], row['memory_bytes'])} GB",
            *(f"{row[name] / 1e12:,.0f} TFLOP/s" for name in ("bf16_flops", "matmul_flops", "fp32_flops")),
            *(f"{row[name] / 1e9:,.0f} GB/s" for name in ("bandwidth", "link")),
        )
    out.print(table, f"{len(rows)} GPUs; sources in docs/design/estimator.md")


def _model(name: str) -> dict[str, Any]:
    published = catalog.find(name)
    assert published is not None, name
    config = published.config
    return {
        "id": name,
        "family": config.get("model_type") or config.get("_class_name"),
        "parameters": published.parameters,
        "context_tokens": _context(config),
        "gated": published.gated,
        "licence": published.licence,
        "source": published.source,
    }


def _context(config: Mapping[str, Any]) -> int | None:
    """Return the longest supported sequence in tokens, or None if the config does not name it."""
    inner = config.get("text_config") or {}
    values = (part.get(name) for part in (config, inner) for name in CONTEXT)
    return next((tokens for tokens in values if isinstance(tokens, int)), None)


def _contains_words(words: Sequence[str] | None, *texts: str) -> bool:
    text = " ".join(texts).lower()
    return all(word.lower() in text for word in words or ())


def _require_match(rows: Sequence[object], words: Sequence[str] | None, noun: str, fix: str) -> None:
    if not rows:
        raise NotFoundExit(f"no {noun} matches {' '.join(words or ())!r}; {fix}")


def _table(heads: Sequence[str], *, right: Sequence[str]) -> Table:
    table = Table()
    for head in heads:
        table.add_column(head, justify="right" if head in right else "left")
    return table


models = command(_models)
gpus = command(_gpus)

"""Model card of a result: inputs, environment, figures and costs."""

import importlib.metadata
import json
import time
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from trainer.contract.checkpoint_format import Rate
from trainer.contract.train import FullConfig
from trainer.core.ipc import WorkerJob
from trainer.models import remote_code

MADE_WITH = ("torch", "transformers", "peft", "accelerate", "safetensors")


def text(job: WorkerJob, *, metrics: Path, scores: Mapping[str, Any], made_on: str, rate: Rate) -> str:
    """Return README.md; a model in a local folder is named by the folder's name only."""
    config = job.train
    base = Path(config.model).name if Path(config.model).is_dir() else config.model
    full = isinstance(config.method, FullConfig)
    library = "diffusers" if config.task == "text_to_image" else "transformers" if full else "peft"
    head: dict[str, Any] = {"library_name": library, "tags": ["gpubroker", config.task]}
    if not Path(config.model).is_dir():
        head["base_model"] = base
    shown = config.model_dump(mode="json", exclude={"model": True, "data": {"path"}, "output": True})
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=True)}---\n",
        f"# {base}, fine-tuned: {config.task}, {config.method.kind}\n",
        _table("Scores", ("", "before", "after"), _scores(scores)),
        _table("Attempts", ("attempt", "steps"), _lineage(metrics)),
        _table(
            "Made of",
            ("what", "which"),
            [("base model", base), *_revision(job), *_made_of(job, rate)],
        ),
        _table("Made with", ("what", "version"), [("processes", made_on), *_versions()]),
        f"## Configuration\n\n```yaml\n{yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)}```\n",
    ]
    return "\n".join(parts)


def _revision(job: WorkerJob) -> list[tuple[str, ...]]:
    commit, code = remote_code.commit(job.train), remote_code.remote_code_fingerprint(job.train)
    return [(what, which) for what, which in (("of commit", commit), ("its own code", code)) if which]


def _made_of(job: WorkerJob, rate: Rate) -> list[tuple[str, ...]]:
    return [
        ("data, sha256", job.data_sha256 or "unknown"),
        ("job", job.job or "unknown"),
        ("learning rate", f"{rate.lr:.3g}, {rate.source or 'as the job says'}"),
        ("cost", _cost(job)),
    ]


def _cost(job: WorkerJob) -> str:
    """Return costs as known when the results are written; the final bill adds the machine's start and end."""
    if job.cost is None:
        return "unknown"
    hours = Decimal(max(0.0, time.time() - job.began)) / 3600
    before, now = job.cost.before, job.cost.before + job.cost.per_hour * hours
    return f"about {now:.4f} USD, {before:.4f} of it before the last attempt"


def _table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows)]
    return f"## {title}\n\n" + "\n".join(lines) + "\n"


def _scores(scores: Mapping[str, Any]) -> list[tuple[str, ...]]:
    before: dict[str, Any] = {"held-out loss": scores.get("heldout_loss_before"), **scores.get("metrics_before", {})}
    after: dict[str, Any] = {"held-out loss": scores.get("heldout_loss_after"), **scores.get("metrics_after", {})}
    return [(name, _number(before.get(name)), _number(after.get(name))) for name in {**before, **after}]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _lineage(metrics: Path) -> list[tuple[str, ...]]:
    """Return which attempt computed which steps of the final run."""
    spans: dict[int, list[int]] = {}
    for line in metrics.read_text().splitlines():
        row = json.loads(line)
        spans.setdefault(row["attempt"], []).append(row["step"])
    return [(str(attempt), f"{min(steps)} to {max(steps)}") for attempt, steps in spans.items()]


def _versions() -> list[tuple[str, ...]]:
    return [(name, importlib.metadata.version(name)) for name in MADE_WITH]

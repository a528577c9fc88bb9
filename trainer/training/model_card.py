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

PACKAGES = ("torch", "transformers", "peft", "accelerate", "safetensors")


def text(job: WorkerJob, *, metrics: Path, scores: Mapping[str, Any], made_on: str, rate: Rate) -> str:
    """Return the text of README.md. A base model in a local folder is shown by the folder's name, not its path."""
    config = job.train
    base = Path(config.model).name if Path(config.model).is_dir() else config.model
    full = isinstance(config.method, FullConfig)
    library = "diffusers" if config.task == "text_to_image" else "transformers" if full else "peft"
    head: dict[str, Any] = {"library_name": library, "tags": ["gpubroker", config.task]}
    if not Path(config.model).is_dir():
        head["base_model"] = base
    settings = config.model_dump(mode="json", exclude={"model": True, "data": {"path"}, "output": True})
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=True)}---\n",
        f"# {base}, fine-tuned: {config.task}, {config.method.kind}\n",
        _table("Scores", ("", "before", "after"), _scores(scores)),
        _table("Attempts", ("attempt", "steps"), _lineage(metrics)),
        _table(
            "Inputs and cost",
            ("input", "value"),
            [("base model", base), *_revision(job), *_made_of(job, rate)],
        ),
        _table("Environment", ("part", "version"), [("processes", made_on), *_versions()]),
        f"## Configuration\n\n```yaml\n{yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)}```\n",
    ]
    return "\n".join(parts)


def _revision(job: WorkerJob) -> list[tuple[str, ...]]:
    commit, code = remote_code.commit(job.train), remote_code.remote_code_fingerprint(job.train)
    rows = (("base model's commit", commit), ("base model's own code", code))
    return [(name, value) for name, value in rows if value]


def _made_of(job: WorkerJob, rate: Rate) -> list[tuple[str, ...]]:
    return [
        ("data, sha256", job.data_sha256 or "unknown"),
        ("job", job.job or "unknown"),
        ("learning rate", f"{rate.lr:.3g}, {rate.source or 'set by the job'}"),
        ("cost", _cost(job)),
    ]


def _cost(job: WorkerJob) -> str:
    """Return the cost at the time of writing. The final bill also covers boot and teardown of the last machine."""
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
    """Return (attempt, range of steps) for each attempt whose steps are part of the final run."""
    spans: dict[int, list[int]] = {}
    for line in metrics.read_text().splitlines():
        row = json.loads(line)
        spans.setdefault(row["attempt"], []).append(row["step"])
    return [(str(attempt), f"{min(steps)} to {max(steps)}") for attempt, steps in spans.items()]


def _versions() -> list[tuple[str, ...]]:
    return [(name, importlib.metadata.version(name)) for name in PACKAGES]

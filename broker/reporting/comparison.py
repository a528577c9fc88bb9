"""Comparison of runs: the result of each run, and the settings in which their specs differ.

The page Compare and `gpubroker compare` use it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from broker.domain.spec import JobSpec
from broker.reporting.progress import AttemptProgress, steps

MAX_RUNS = 8
"""Maximum number of runs of a comparison."""
SHOWN_ELSEWHERE = frozenset({"name"})
"""Settings that a comparison shows as the heading of each run."""


@dataclass(frozen=True, kw_only=True)
class ReportedResult:
    """Progress and quality of a run. None: not reported."""

    step: int
    """Furthest optimizer step."""
    total_steps: int
    """Planned optimizer steps; 0: not known."""
    loss: float | None
    """Latest reported training loss."""
    heldout_before: float | None
    heldout_after: float | None
    """Held-out loss at the end, or during the run the latest one."""
    tokens_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class SpecDifference:
    """A setting that the compared specs do not share."""

    path: str
    values: tuple[Any, ...]
    """Value in each spec, in the order of the runs; None: not set."""


def run_result(attempts: Sequence[AttemptProgress]) -> ReportedResult:
    """Return the result of a run from the reports of its attempts, in the order of their numbers."""
    beats = [a.beat for a in attempts if a.beat is not None]
    finals = [a.final for a in attempts if a.final is not None]
    return ReportedResult(
        step=max((end for _, end in map(steps, attempts) if end is not None), default=0),
        total_steps=max([0, *(b.total_steps for b in beats), *(f.total_steps for f in finals)]),
        loss=_latest(b.loss for b in beats),
        heldout_before=_latest(f.heldout_loss_before for f in finals),
        heldout_after=_latest([*(b.heldout_loss for b in beats), *(f.heldout_loss_after for f in finals)]),
        tokens_per_s=_latest(
            rate for a in attempts for document in (a.beat, a.final) if document for rate in (document.tokens_per_s,)
        ),
    )


def _latest(values: Iterable[float | None]) -> float | None:
    """Return the last value that is not None."""
    numbers = [value for value in values if value is not None]
    return numbers[-1] if numbers else None


def spec_differences(specs: Sequence[JobSpec]) -> list[SpecDifference]:
    """Return the settings that differ between specs; an omitted setting is equal to one with its default."""
    flat = [dict(_settings(spec.model_dump(mode="json"), spec.model_dump())) for spec in specs]
    paths = dict.fromkeys(path for settings in flat for path in settings)
    return [
        SpecDifference(path=path, values=values)
        for path in paths
        if path not in SHOWN_ELSEWHERE and len(set(map(_text, values := tuple(s.get(path) for s in flat)))) > 1
    ]


def _settings(document: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, JSON value) of each setting; a list is one setting. `values`: the same with Decimals.

    Amounts are normalised, because $5 and $5.00 are the same cap.
    """
    for name, inner in document.items():
        value = values[name]
        if isinstance(inner, Mapping):
            yield from _settings(inner, value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", f"{value.normalize():f}" if isinstance(value, Decimal) else inner


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def setting_text(value: Any) -> str:
    """Return the value of a setting as one line; `–` if it is not set."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

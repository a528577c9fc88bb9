"""Early stopping, and the choice of the evaluation whose weights are the result."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from trainer.checkpoint.snapshot import Local, StoredSnapshot
from trainer.contract.checkpoint_format import Best, Progress
from trainer.contract.guard import LOSS, SelectionConfig
from trainer.core.errors import UserFault
from trainer.parallel import ddp

ERRORS = ("loss", "mae", "rmse")
"""Endings of names of metrics that are better when lower."""

Scores = tuple[tuple[int, float], ...]


def value(config: SelectionConfig, loss: float, metrics: Mapping[str, float]) -> float:
    """Return the chosen metric of an evaluation. Raises: UserFault if the task does not have it."""
    values = {**metrics, LOSS: loss}
    if config.metric not in values:
        raise UserFault(f"train.selection.metric: no {config.metric!r} here; the task has {', '.join(sorted(values))}")
    return values[config.metric]


def is_better(config: SelectionConfig, score: float, than: float, *, by: float = 0.0) -> bool:
    """Return True if `score` is better by more than `by`.

    NaN is never better, and any number is better than NaN.
    """
    if math.isnan(score) or math.isnan(than):
        return not math.isnan(score)
    gain = than - score if config.metric.endswith(ERRORS) else score - than
    return gain > by


def best(config: SelectionConfig, scores: Scores) -> tuple[int, float] | None:
    """Return (step, value) of the evaluation that no later one beat by `min_delta`; None before the first."""
    selected: tuple[int, float] | None = None
    for step, score in scores:
        if selected is None or is_better(config, score, selected[1], by=config.min_delta):
            selected = step, score
    return selected


def early_stop_reason(config: SelectionConfig, scores: Scores) -> str:
    """Return why training should stop early; empty: it continues."""
    selected = best(config, scores)
    if config.patience is None or selected is None:
        return ""
    best_step, score = selected
    since = sum(1 for step, _ in scores if step > best_step)
    if since < config.patience:
        return ""
    return f"stopped early: {since} evaluations were no better than {config.metric} {score:.4f} after step {best_step}"


class Selection:
    """Choice of the result's weights. If `best` is configured, it holds the best evaluation's weights in host memory.

    `min_delta` applies to early stopping only: any improvement makes an evaluation the best.
    """

    def __init__(self, config: SelectionConfig, job: str = "") -> None:
        """Create for a job. Its id matters, because jobs have different held-out rows and incomparable scores."""
        self.config = config
        self._by = f"{job} {config.metric}".strip()
        self._weights: dict[str, torch.Tensor] = {}
        """Weights of the best evaluation by parameter; empty: none is held."""

    def scored(
        self, progress: Progress, loss: float, metrics: Mapping[str, float], parameters: Mapping[str, torch.Tensor]
    ) -> Progress:
        """Record an evaluation of the current weights."""
        score = value(self.config, loss, metrics)
        scores = (*(s for s in progress.scores if s[0] != progress.step), (progress.step, score))
        selected = progress.best
        if self.config.best and (selected is None or is_better(self.config, score, selected.value)):
            self._weights = {n: ddp.local(p).to("cpu", copy=True) for n, p in parameters.items()}
            selected = Best(step=progress.step, value=score)
        return progress.model_copy(update={"scores": scores, "scores_by": self._by, "best": selected})

    def held(self, parameters: Mapping[str, Local]) -> dict[str, Local]:
        """Return the best weights for a checkpoint; `parameters` are the current ones."""
        if not self._weights:
            return {}
        return {name: replace(current, tensor=self._weights[name]) for name, current in parameters.items()}

    def restore(self, stored: StoredSnapshot, parameters: Mapping[str, torch.Tensor]) -> Progress:
        """Return the checkpoint's progress with the scores that are valid in this run.

        Scores of another job or by another metric are dropped, and so are scores whose weights should have been
        saved but were not.

        Raises: KeyError, ValueError.
        """
        progress = stored.progress
        other = progress.scores_by != self._by
        selected = None if other or not self.config.best else progress.best
        if selected is not None:
            self._weights = {n: stored.read("best", n, ddp.window(p)) for n, p in parameters.items()}
        is_lost = self.config.best and selected is None
        return progress.model_copy(update={"scores": () if other or is_lost else progress.scores, "best": selected})

    @contextlib.contextmanager
    def chosen(
        self, progress: Progress, reshard: Callable[[], None], parameters: Mapping[str, torch.Tensor]
    ) -> Iterator[int | None]:
        """Install the best weights and yield their step; None if the last weights are best or no choice is configured.

        `reshard` is called before weights are changed.
        """
        selected = progress.best
        if selected is None or selected.step == progress.step:
            yield None
            return
        last = {n: ddp.local(p).to("cpu", copy=True) for n, p in parameters.items()}
        _install(self._weights, reshard, parameters)
        try:
            yield selected.step
        finally:  # also if the results cannot be written: the last weights are then saved with their moments
            _install(last, reshard, parameters)


def _install(
    tensors: Mapping[str, torch.Tensor], reshard: Callable[[], None], parameters: Mapping[str, torch.Tensor]
) -> None:
    reshard()
    for name, parameter in parameters.items():
        ddp.local(parameter).copy_(tensors[name])

"""What the evaluations decide: whether to go on, and whose weights are the result."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from trainer import parallel
from trainer.checkpoint_plan import Progress
from trainer.contract.guard import LOSS, SelectionConfig
from trainer.faults import UserFault
from trainer.snapshot import Local, Stored

ERRORS = ("loss", "mae", "rmse")
"""End the names of metrics that are better when lower."""

Scores = tuple[tuple[int, float], ...]


def value(config: SelectionConfig, loss: float, metrics: Mapping[str, float]) -> float:
    """The chosen metric of an evaluation. Raises UserFault for one that the task does not have."""
    known = {**metrics, LOSS: loss}
    if config.metric not in known:
        raise UserFault(f"train.selection.metric: no {config.metric!r} here; the task has {', '.join(sorted(known))}")
    return known[config.metric]


def better(config: SelectionConfig, one: float, than: float) -> bool:
    """By more than `min_delta`; what is no number is never better, and anything is better than that."""
    if math.isnan(one) or math.isnan(than):
        return not math.isnan(one)
    gain = than - one if config.metric.endswith(ERRORS) else one - than
    return gain > config.min_delta


def best(config: SelectionConfig, scores: Scores) -> tuple[int, float] | None:
    """(step, value) of the evaluation that no later one was better than; None before the first."""
    found: tuple[int, float] | None = None
    for step, score in scores:
        if found is None or better(config, score, found[1]):
            found = step, score
    return found


def enough(config: SelectionConfig, scores: Scores) -> str:
    """Why the training need not go on; empty: it goes on."""
    found = best(config, scores)
    if config.patience is None or found is None:
        return ""
    since = sum(1 for step, _ in scores if step > found[0])
    if since < config.patience:
        return ""
    return (
        f"stopped early: {since} evaluations were no better than {config.metric} {found[1]:.4f} after step {found[0]}"
    )


class Selection:
    """Keeps the weights of the best evaluation in host memory, where they are asked for."""

    def __init__(self, config: SelectionConfig) -> None:
        self.config = config
        self._kept: dict[str, torch.Tensor] = {}

    def scored(
        self, progress: Progress, loss: float, metrics: Mapping[str, float], parameters: Mapping[str, torch.Tensor]
    ) -> Progress:
        """After an evaluation of these weights."""
        score = value(self.config, loss, metrics)
        scores = (*(s for s in progress.scores if s[0] != progress.step), (progress.step, score))
        found = best(self.config, scores)
        if self.config.best and found is not None and found[0] == progress.step:
            self._kept = {n: parallel.local(p).to("cpu", copy=True) for n, p in parameters.items()}
        return progress.model_copy(update={"scores": scores})

    def held(self, parameters: Mapping[str, Local]) -> dict[str, Local]:
        """For a checkpoint; `parameters`: as they are now."""
        return {n: replace(one, tensor=self._kept[n]) for n, one in parameters.items()} if self._kept else {}

    def restore(self, stored: Stored, parameters: Mapping[str, torch.Tensor]) -> None:
        """Raises KeyError, ValueError."""
        if self.config.best and stored.names("best"):
            self._kept = {n: stored.read("best", n, parallel.window(p)) for n, p in parameters.items()}

    @contextlib.contextmanager
    def chosen(
        self, progress: Progress, settle: Callable[[], None], parameters: Mapping[str, torch.Tensor]
    ) -> Iterator[int | None]:
        """The best weights in place of the last ones, and their step; None where the last ones are the best, or where
        that was not asked for. `settle`: called before weights are changed."""
        found = best(self.config, progress.scores)
        if not self.config.best or found is None or found[0] == progress.step:
            yield None
            return
        last = {n: parallel.local(p).to("cpu", copy=True) for n, p in parameters.items()}
        _put(self._kept, settle, parameters)
        try:
            yield found[0]
        finally:  # also where the results cannot be written: the last weights are saved then, beside their moments
            _put(last, settle, parameters)


def _put(
    tensors: Mapping[str, torch.Tensor], settle: Callable[[], None], parameters: Mapping[str, torch.Tensor]
) -> None:
    settle()
    for name, parameter in parameters.items():
        parallel.local(parameter).copy_(tensors[name])

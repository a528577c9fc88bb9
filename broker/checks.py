"""The checks of `broker.preflight` as the API wants them: over stored summaries, with model shapes remembered."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from broker.api.service import Checked
from broker.domain.offer import ModelShape
from broker.domain.spec import JobSpec
from broker.ports import Clock
from broker.preflight.check import preflight
from broker.preflight.data import DataSummary, summarise
from broker.preflight.models import HubClient, is_folder, resolve
from trainer.contract.train import DataFormat

SHAPE_S = 60.0
"""A folder's config may change; a submit must not read it every time."""
SHAPES = 256


class Checks:
    """`api.service.Preflight`. `hub` None: no network is asked."""

    def __init__(self, hub: HubClient | None, clock: Clock) -> None:
        self._hub = hub
        self._clock = clock
        self._shapes: dict[str, tuple[float, ModelShape]] = {}

    def summarise(self, data: bytes, fmt: DataFormat) -> Mapping[str, Any]:
        return summarise(data, fmt).model_dump(mode="json")

    async def check(self, spec: JobSpec, summary: Mapping[str, Any] | None) -> Checked:
        known = None if summary is None else DataSummary.model_validate(summary)
        found = await preflight(spec, summary=known, resolve=self._resolve)
        shape = found.workload.shape
        report = {
            "data": None if found.report is None else found.report.model_dump(mode="json"),
            "model": None if shape is None else asdict(shape),
        }
        local = spec.train is not None and is_folder(spec.train.model)
        return Checked(workload=found.workload, report=report, local_model=local)

    async def _resolve(self, model: str) -> ModelShape:
        now = self._clock.monotonic()
        held = self._shapes.get(model)
        if held is not None and held[0] > now:
            return held[1]
        shape = await resolve(model, hub=self._hub)
        if len(self._shapes) >= SHAPES:
            self._shapes.clear()
        self._shapes[model] = (now + SHAPE_S, shape)
        return shape

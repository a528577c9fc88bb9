"""Adapter of `broker.preflight` for the API: checks run on stored summaries, and their results are cached.

Many jobs have the same spec and data set, and a submit must be cheap, so a result is reused. It expires after a
minute, because a model's folder or its licence may change.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from broker.api.core.bounded_cache import BoundedCache, summary_bytes
from broker.api.schemas.quotes import WhatIfRequest, WhatIfView
from broker.api.service.interfaces import Checked
from broker.billing.invoice_formats import Format
from broker.billing.reconcile import Invoice
from broker.daemon.what_if_adapter import answer_what_if
from broker.domain.errors import InvalidInput
from broker.domain.spec import JobSpec
from broker.ports import Clock
from broker.preflight import remote_code as code
from broker.preflight.check import preflight
from broker.preflight.dataset import DataSummary
from broker.preflight.model_folders import ModelFolders
from broker.preflight.model_lookup import HubClient, is_folder, resolve_for
from broker.preflight.parse_process import parse, parse_invoice
from broker.runtime.cpu_threads import RunCpu, run_inline
from trainer.contract.data_config import DataFormat

REMEMBERED_S = 60.0
REMEMBERED, REMEMBERED_BYTES = 256, 64 << 20
"""Maximum number of results that are kept, and about how much memory their data sets' summaries take."""


@dataclass(frozen=True, kw_only=True)
class _FoundModel:
    checked: Checked
    summary: Mapping[str, Any] | None
    """Checked summary. The reference keeps the summary alive, because the cache key contains its `id()`."""
    until: float


def forbidden(remote_code: Sequence[str], spec: JobSpec) -> str:
    """Return why the installation forbids this job, in one line; empty if the job is allowed."""
    try:
        code.check(spec.train, remote_code)
    except InvalidInput as error:
        return "; ".join(f"{problem.field}: {problem.message}" for problem in error.problems)
    return ""


class Checks:
    """Implements `broker.api.service.interfaces.Preflight`.

    `hub` None: models are looked up without network. `remote_code`: patterns of models whose code may run.
    `folders`: folders of this host that jobs may name.
    """

    def __init__(
        self,
        hub: HubClient | None,
        clock: Clock,
        remote_code: Sequence[str] = (),
        folders: ModelFolders | None = None,
    ) -> None:
        self._hub = hub
        self._folders = folders or ModelFolders()
        self._clock = clock
        self._remote_code = remote_code
        self._found: BoundedCache[Hashable, _FoundModel] = BoundedCache(REMEMBERED_BYTES, REMEMBERED)

    async def summarise(self, data: Path, fmt: DataFormat) -> Mapping[str, Any] | None:
        return await parse(data, fmt)

    async def read_invoice(self, data: Path, fmt: Format) -> Invoice:
        return await parse_invoice(data, fmt)

    def permit(self, spec: JobSpec) -> JobSpec:
        return spec.with_train(code.check(spec.train, self._remote_code))

    def what_if(self, request: WhatIfRequest) -> WhatIfView:
        return answer_what_if(request)

    async def check(self, spec: JobSpec, summary: Mapping[str, Any] | None, run: RunCpu = run_inline) -> Checked:
        if spec.train is not None:
            spec = spec.with_train(await self._folders.permit(spec.train, run))
        key = (spec.train, spec.checkpoint, id(summary))
        now = self._clock.monotonic()
        cached = self._found.get(key)
        if cached is not None and cached.until > now:
            return cached.checked
        checked = await self._check(spec, summary, run)
        remembered = _FoundModel(checked=checked, summary=summary, until=now + REMEMBERED_S)
        self._found.put(key, remembered, summary_bytes(summary))
        return checked

    async def _check(self, spec: JobSpec, summary: Mapping[str, Any] | None, run: RunCpu) -> Checked:
        stored_summary = None if summary is None else await run(partial(DataSummary.model_validate, summary))
        resolve = partial(resolve_for, hub=self._hub, run=run)
        result = await preflight(spec, summary=stored_summary, resolve=resolve, run=run)
        shape = result.workload.shape
        report = {
            "data": None if result.report is None else result.report.model_dump(mode="json"),
            "model": None if shape is None else asdict(shape),
        }
        local = spec.train is not None and is_folder(spec.train.model)
        return Checked(workload=result.workload, report=report, local_model=local)

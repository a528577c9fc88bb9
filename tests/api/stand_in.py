"""A preflight from the contract's own checks and a fixed model shape: no network, no tokenizer."""

from collections.abc import Mapping
from typing import Any

from broker.api.service import Checked
from broker.decide.workload import Rows, workload
from broker.domain.errors import InvalidInput, Problem
from broker.domain.offer import ModelShape
from broker.domain.spec import JobSpec
from trainer.contract.data import DataError, check_templates, read_rows
from trainer.contract.train import DataFormat

SHAPE = ModelShape(
    name="test/tiny", family="llama", layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64,
    vocabulary=49_152, tied_embeddings=True, parameters=134_515_008, known=True,
)  # fmt: skip


class ContractPreflight:
    def summarise(self, data: bytes, fmt: DataFormat) -> Mapping[str, Any]:
        rows = list(read_rows(data, fmt))
        if not rows:
            raise DataError("data: no rows; give a file with at least one row")
        return {"rows": len(rows), "columns": sorted(rows[0])}

    async def check(self, spec: JobSpec, summary: Mapping[str, Any] | None) -> Checked:
        if spec.train is None or summary is None:
            return Checked(workload=workload(spec, None, None), report={})
        if spec.train.model != SHAPE.name:
            message = f"no model {spec.train.model!r} on the Hub; check its name"
            raise InvalidInput(Problem(field="train.model", message=message))
        try:
            check_templates(spec.train.data, frozenset(summary["columns"]))
        except DataError as error:
            field, _, message = str(error).partition(": ")
            raise InvalidInput(Problem(field=f"train.{field}", message=message)) from None
        rows = Rows(count=summary["rows"], tokens_mean=40.0, tokens_longest=60)
        return Checked(workload=workload(spec, SHAPE, rows), report={"data": dict(summary)})

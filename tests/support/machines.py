"""Builders for the estimators' tests: a shape, a workload, an offer, a quote."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from broker.domain.instance import Caps
from broker.domain.offer import GIB, Offer, Quote
from broker.domain.spec import JobSpec
from broker.domain.workload import ModelShape, Workload
from broker.quote.engine import quote

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LLAMA_3_8B = ModelShape(
    name="meta-llama/Llama-3.1-8B", family="llama", layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8,
    head_dim=128, vocabulary=128256, tied_embeddings=False, parameters=8_030_261_248, known=True,
)  # fmt: skip
MISTRAL_7B = replace(LLAMA_3_8B, family="mistral", vocabulary=32000, parameters=7_241_732_096)
SMOLLM2_135M = ModelShape(
    name="HuggingFaceTB/SmolLM2-135M", family="llama", layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3,
    head_dim=64, vocabulary=49152, tied_embeddings=True, parameters=134_515_008, known=True,
)  # fmt: skip
WORK = Workload(
    shape=LLAMA_3_8B, method="lora", lora_r=16, gradient_checkpointing=True, micro_batch=1, global_batch=8,
    sequence=2048, tokens_per_row=900.0, steps=500, eval_rows=100,
)  # fmt: skip
LONG = replace(WORK, sequence=16_384, tokens_per_row=16_000.0)
"""Workload with rows so long that the GPU's time for them exceeds the host's launch time."""
SCRIPT = Workload(shape=None, method="script")
CAPS = {"cloud": Caps(spot=True, boot_s=120), "mine": Caps(spot=False, trust="own", reaches_local_files=True, boot_s=1)}


def spec(**changes: Any) -> JobSpec:
    train = {"model": "a/b", "data": {"path": "rows.csv", "completion": "{text}"}, **changes.pop("train", {})}
    return JobSpec.model_validate({"name": "job", "cap_usd": "100", "train": train, **changes})


def offer(**changes: Any) -> Offer:
    base = Offer(
        id="cloud/x", provider="cloud", cloud="Cloud", region="eu", instance_type="1xH100", accelerator="h100-sxm",
        gpus=1, gpu_memory_bytes=80 * GIB, vcpus=26, ram_bytes=200 * GIB, disk_bytes=10**12, spot=False,
        usd_per_hour=Decimal("2.50"), seen_at=NOW,
    )  # fmt: skip
    return replace(base, **changes)


def quoted(
    offers: Sequence[Offer],
    *,
    resources: Mapping[str, Any] | None = None,
    work: Workload = WORK,
    cap_left: Decimal = Decimal(100),
    spent: Decimal = Decimal(0),
    excluded: Mapping[str, str] | None = None,
    local_files: bool = False,
    scoped_store: bool = True,
    caps: Mapping[str, Caps] = CAPS,
) -> Quote:
    return quote(
        spec(resources=dict(resources or {})),
        work,
        offers,
        now=NOW,
        local_files=local_files,
        scoped_store=scoped_store,
        spent=spent,
        cap_left=cap_left,
        excluded=excluded or {},
        caps=caps,
    )

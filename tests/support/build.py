"""Small valid objects for tests of pure functions."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from broker.billing.drain import DrainBudget
from broker.domain.ids import Installation, JobId, attempt_id, instance_name
from broker.domain.job import Attempt, AttemptState, Job, JobState, PriceChange
from broker.domain.offer import GIB, Offer, OfferVerdict, QuoteLine
from broker.domain.spec import JobSpec
from broker.domain.workload import Workload

T0 = datetime(2026, 1, 1, tzinfo=UTC)
INSTALLATION = Installation("test")
JOB_ID = JobId("a" * 13)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def offer(**changes: Any) -> Offer:
    values: dict[str, Any] = {
        "id": "simulated/runpod/eu/l40s/spot", "provider": "simulated", "cloud": "runpod", "region": "eu",
        "instance_type": "l40s", "accelerator": "l40s", "gpus": 1, "gpu_memory_bytes": 48 * GIB, "vcpus": 8,
        "ram_bytes": 64 * GIB, "disk_bytes": 200 * GIB, "spot": True, "usd_per_hour": Decimal("0.36"),
        "on_demand_usd_per_hour": Decimal("0.90"), "billing_quantum_s": 1, "seen_at": T0,
    }  # fmt: skip
    return Offer(**(values | changes))


def line(**changes: Any) -> QuoteLine:
    return QuoteLine(offer=offer(**changes), verdict=OfferVerdict.KEPT, reason="fits")


def spec(**changes: Any) -> JobSpec:
    values: dict[str, Any] = {"name": "job", "cap_usd": "1", "script": {"code": "upload:00", "command": ["true"]}}
    return JobSpec.model_validate(values | changes)


def job(*, spec_changes: dict[str, Any] | None = None, **changes: Any) -> Job:
    wanted = spec(**(spec_changes or {}))
    values: dict[str, Any] = {
        "id": JOB_ID, "owner": "me", "spec": wanted, "workload": Workload(shape=None, method="script"),
        "created_at": T0, "cap_usd": wanted.cap_usd,
    }  # fmt: skip
    return Job(**(values | changes))


def active_job(**changes: Any) -> Job:
    return job(**({"state": JobState.ACTIVE, "attempts": 1} | changes))


def changes(*prices: tuple[float, str]) -> tuple[PriceChange, ...]:
    """Return the price changes of (seconds after T0, dollars an hour) pairs."""
    return tuple(PriceChange(since=at(seconds), usd_per_hour=Decimal(price)) for seconds, price in prices)


def attempt(state: AttemptState = AttemptState.TRAINING, **changes: Any) -> Attempt:
    new = attempt_id(JOB_ID, 1)
    values: dict[str, Any] = {
        "id": new, "job_id": JOB_ID, "number": 1, "name": instance_name(INSTALLATION, new), "line": line(),
        "created_at": T0, "reserved_usd": Decimal(1_000_000), "state": state,
    }  # fmt: skip
    if state is not AttemptState.PLANNED:
        values["create_sent_at"] = T0
    return Attempt(**(values | changes))


def drain_budget(*, tick_s: float = 10, drain_s: float = 60, hands_s: float = 7) -> DrainBudget:
    return DrainBudget(detect_s=tick_s, drain_s=drain_s, teardown_proof_s=hands_s)

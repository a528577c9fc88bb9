"""Calls that users write in a notebook without reading the reference."""

import inspect
from datetime import UTC, datetime
from decimal import Decimal

import broker
from broker.api.schemas.job_list import JobPage, JobView
from broker.domain.ids import JobId
from broker.domain.job import JobState


def test_fit_takes_the_model_and_the_data_by_position() -> None:
    call = inspect.signature(broker.fit).bind("owner/name", "rows.csv", cap_usd=1)
    assert call.arguments == {"model": "owner/name", "data": "rows.csv", "cap_usd": 1}


def test_a_page_of_jobs_iterates_over_the_jobs() -> None:
    jobs = tuple(
        JobView(
            id=JobId(name), name=name, team="default", owner="local", state=JobState.QUEUED, reason="", labels={},
            created_at=datetime(2026, 1, 1, tzinfo=UTC), finished_at=None, cap_usd=Decimal(1), spent_usd=Decimal(0),
            attempts=0, retries_used=0, stop_requested=False, retry_of=None,
        )
        for name in ("first", "second")
    )  # fmt: skip
    page = JobPage(items=jobs, next=None)
    assert [job.name for job in page] == ["first", "second"]
    assert JobPage.model_validate_json(page.model_dump_json()) == page

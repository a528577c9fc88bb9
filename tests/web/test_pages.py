"""Pages of jobs and runs: contents, empty states and errors."""

import re
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

from broker.domain.job import AttemptState, JobState, Reason
from broker.ports import Change
from tests.api.harness import Running
from tests.conformance.samples import START, ManualClock, admission, claimed_job, in_state
from tests.web.seed import fill
from tests.web.test_security import submitted
from tests.web.visitor import Visitor
from trainer.contract.documents import Heartbeat


async def test_browsers_are_sent_from_the_root_and_programs_are_not(ada: Visitor) -> None:
    there = await ada.get("/", {"Accept": "text/html,*/*;q=0.8"})
    assert (there.status, there.location) == (303, "/ui/jobs")
    program = await ada.get("/", {"Accept": "*/*"})
    assert (program.status, "no such endpoint" in program.text) == (404, True)
    assert (await ada.get("/ui")).location == "/ui/jobs"


async def test_filters_are_in_the_url_and_faults_next_to_their_field(api: Running, ada: Visitor) -> None:
    job = await submitted(api, labels={"team": "nlp"})
    assert job in (await ada.get("/ui/jobs?state=queued&label=team:nlp&owner=ada")).text
    empty = await ada.get("/ui/jobs?state=failed")
    assert "No job matches these filters" in empty.text
    wrong = await ada.get("/ui/jobs?label=nonsense&state=lost")
    assert wrong.status == 422
    assert 'id="fault-label"' in wrong.text
    assert "must be a label, as key:value" in wrong.text
    assert 'id="fault-state"' in wrong.text


async def test_the_list_continues_on_the_next_page(api: Running, ada: Visitor) -> None:
    first, second = await submitted(api), await submitted(api)
    page = await ada.get("/ui/jobs?limit=1")
    assert second in page.text
    assert first not in page.text
    following = page.text.partition('href="/ui/jobs?limit=1&amp;cursor=')[2].partition('"')[0]
    assert first in (await ada.get(f"/ui/jobs?limit=1&cursor={following}")).text


async def trained(api: Running, *, ended: bool = False) -> str:
    """Return a job with a running attempt at step 17 of 45, or with one that completed."""
    job_id = await submitted(api)
    store = api.service.store
    job = await claimed_job(store)
    assert await store.apply([admission(job)]) == [True]
    attempt, *_ = await store.attempts(job.id)
    beat = Heartbeat.model_validate(
        {"attempt": attempt.id, "boot": "b", "seq": 3, "phase": "training", "step": 17, "total_steps": 45, "loss": 2.5,
         "tokens_per_s": 812.0}
    )  # fmt: skip
    state = AttemptState.ENDED if ended else AttemptState.TRAINING
    now = replace(
        in_state(attempt, state), beat=beat, first_beat_at=START + timedelta(minutes=3),
        reason=Reason.COMPLETED if ended else None, charged_usd=Decimal("0.31"),
    )  # fmt: skip
    active = await store.job(job.id)
    assert active is not None
    over = replace(active, state=JobState.SUCCEEDED, finished_at=START + timedelta(hours=1), reason="done")
    change = Change(attempt=(attempt, now), job=(active, over)) if ended else Change(attempt=(attempt, now))
    assert await store.apply([change]) == [True]
    return job_id


async def test_every_page_of_jobs_in_every_state_opens(api: Running, ada: Visitor) -> None:
    """Jobs with forecasts, receipts, preemptions and failures have figures that others lack."""
    await fill(api.service.store, ManualClock(), START)
    listed = await ada.get("/ui/jobs")
    jobs = set(re.findall(r'href="/ui/jobs/([a-z2-7]{13})"', listed.text))
    assert len(jobs) == 5
    pages = {job: (await ada.get(f"/ui/jobs/{job}")) for job in jobs}
    assert {page.status for page in pages.values()} == {200}
    texts = "".join(page.text for page in pages.values())
    for shown in (
        "$0.9207 – $1.13, ",
        "Receipt",
        "10 redone",
        "step 160 is saved",
        "Raise the cap to continue",
        "preempted",
    ):
        assert shown in texts, shown
    for job in jobs:
        for tab in ("events", "decision", "logs", "spec"):
            assert (await ada.get(f"/ui/jobs/{job}/{tab}")).status == 200


async def test_a_job_runs_again_only_at_the_cap_that_was_shown(api: Running, ada: Visitor) -> None:
    job = await trained(api, ended=True)
    page = (await ada.get(f"/ui/jobs/{job}")).text
    (shown,) = re.findall(r'name="shown_cap" value="([^"]*)"', page)
    assert Decimal(shown) == 5
    for fields in ({}, {"shown_cap": "4"}):
        refused = await ada.send(f"/ui/jobs/{job}/retry", **fields)
        assert refused.status == 409
        assert "the page showed another cap than $5.00" in refused.text
    again = await ada.send(f"/ui/jobs/{job}/retry", shown_cap=shown)
    assert again.status == 303
    assert again.location != f"/ui/jobs/{job}"


async def test_a_run_begins_with_state_step_loss_and_money(api: Running, ada: Visitor) -> None:
    job = await trained(api)
    page = (await ada.get(f"/ui/jobs/{job}")).text
    assert "training" in page
    assert "step <b>17</b> of 45" in page
    assert "loss <b>2.500</b>" in page
    assert "of $5.00" in page
    assert "alpha" in page
    assert f'sse-connect="/ui/jobs/{job}/stream"' in page
    listed = (await ada.get("/ui/jobs")).text
    assert "l40s" in listed
    assert "alpha" in listed

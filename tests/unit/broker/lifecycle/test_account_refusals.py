"""Scope of a refused create (account or offer), and refusals that count together."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from broker.domain.job import Attempt, AttemptState, JobState, Reason
from broker.domain.offer import Offer
from broker.lifecycle.account_refusals import (
    BLOCK_S,
    MAX_BLOCK_S,
    MAX_OFFER_BLOCK_S,
    account_keys,
    account_refusal,
    block_s,
    offer_block_s,
    refused_by_account,
    refused_in_a_row,
    refusing_accounts,
)
from broker.lifecycle.transitions import after_attempt
from tests.support import build

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CREDIT = "runpod: insufficient balance"


def offer(**changes: object) -> Offer:
    base = replace(build.attempt(AttemptState.ENDED).line.offer, provider="sky", cloud="runpod", region="us")
    return replace(base, accelerator="h100", spot=False, **changes)  # type: ignore[arg-type]


def refused(message: str = CREDIT, **changes: object) -> Attempt:
    attempt = build.attempt(AttemptState.ENDED, reason=Reason.REJECTED, first_beat_at=None, handles=(), booted_at=None)
    refusal = account_refusal(offer(), message)
    detail = f"{refusal.message} ({message})" if refusal else message
    line = replace(attempt.line, offer=offer())
    return replace(attempt, line=line, running_at=None, **{"detail": detail, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "key"),
    [
        (CREDIT, "account:sky/runpod/"),
        ("runpod: Insufficient credits in the account; pay in at the cloud", "account:sky/runpod/"),
        ("RunPod refuses the key (401): make one", "account:sky/runpod/"),
        ("AWS: RunInstances: UnauthorizedOperation: You are not authorized", "account:sky/runpod/"),
        ("AWS: RunInstances: VcpuLimitExceeded: more than; raise the quota", "account:sky/runpod/us/h100/on-demand"),
        ("aws: found no quota for p5.48xlarge; raise the account's quota", "account:sky/runpod/us/h100/on-demand"),
        ("aws: instance type x9 not found; ask for another region or machine", None),
        ("RunPod: POST /v1/pods: 400 bad request", None),
    ],
)
def test_a_refusal_blames_the_account_or_one_offer(message: str, key: str | None) -> None:
    found = account_refusal(offer(), message)
    assert (found.key if found else None) == key
    if found is not None:
        assert found.key in account_keys(offer())
        assert message not in found.message


def test_another_kind_of_machine_has_another_quota() -> None:
    found = account_refusal(offer(), "quota")
    assert found is not None
    assert found.key not in account_keys(replace(offer(), spot=True))
    assert found.key not in account_keys(replace(offer(), accelerator="l4"))


def test_a_refusal_of_the_account_costs_no_retry_and_one_of_an_offer_does() -> None:
    job = replace(build.active_job(), retries_used=build.active_job().spec.retry.max)
    for attempt, state in ((refused(), JobState.RECOVERING), (refused("400 bad request"), JobState.FAILED)):
        after = after_attempt(job, attempt, Reason.REJECTED, attempt.detail, NOW)
        assert (after.state, after.retries_used) == (state, job.retries_used)


def test_a_refusal_before_the_cloud_call_does_not_blame_the_account() -> None:
    assert refused_by_account(refused())
    assert not refused_by_account(refused(detail="secret out of credit is no longer set"))
    assert not refused_by_account(refused(booted_at=NOW))


@pytest.mark.parametrize(
    ("earlier", "counted"),
    [
        ([refused(), refused()], 2),
        ([refused(), replace(refused(), reason=Reason.PREEMPTED, first_beat_at=NOW)], 0),
        ([replace(refused(), reason=Reason.PREEMPTED, first_beat_at=NOW), refused()], 1),
        ([refused(), replace(refused(), reason=Reason.PREEMPTED), refused()], 2),
    ],
)
def test_refusals_before_one_that_came_up_do_not_count(earlier: Sequence[Attempt], counted: int) -> None:
    assert len(refused_in_a_row(earlier)) == counted


def test_an_account_is_blocked_for_longer_each_time() -> None:
    found = account_refusal(offer(), CREDIT)
    assert found is not None
    blocks = [block_s(found, [refused()] * times) for times in (0, 1, 2, 3, 50)]
    assert blocks == [BLOCK_S, 2 * BLOCK_S, 4 * BLOCK_S, MAX_BLOCK_S, MAX_BLOCK_S]
    assert block_s(found, [refused("quota")] * 3) == BLOCK_S


def test_refusals_of_the_jobs_own_providers_are_reported() -> None:
    blocks = {"account:sky/runpod/": "no credit", "account:lambda/": "no key", "cloud/x": "sold out"}
    assert list(refusing_accounts(blocks, ())) == ["no credit", "no key"]
    assert list(refusing_accounts(blocks, ("lambda",))) == ["no key"]


def test_an_offer_that_is_refused_again_is_blocked_for_longer() -> None:
    """Refusals of other offers, and those before a machine, do not count."""
    sold_out = refused("no capacity", reason=Reason.NO_CAPACITY)
    own, base_s = sold_out.line.offer.id, 120.0
    blocks = [offer_block_s(own, [sold_out] * times, base_s) for times in (0, 1, 2, 3, 50)]
    assert blocks == [base_s, 2 * base_s, 4 * base_s, MAX_OFFER_BLOCK_S, MAX_OFFER_BLOCK_S]
    ran = build.attempt(AttemptState.ENDED, first_beat_at=NOW)
    assert offer_block_s(own, [sold_out, sold_out, ran], base_s) == base_s
    assert offer_block_s("another", [sold_out] * 3, base_s) == base_s

"""Lease release: after a lost claim or a failed write, a row does not wait for its lease to expire."""

from collections.abc import Mapping, Sequence
from typing import cast

import pytest

from broker.controllers.base.claims import Claims
from broker.controllers.base.context import ControllerContext
from broker.domain.errors import BlobsUnavailable, StoreUnavailable
from broker.domain.ids import Installation
from broker.domain.job import Attempt
from broker.ports import Blobs, Lane, Leased, Store
from tests.conformance.samples import HOUR, ManualClock, running
from tests.support.memory_store.store import MemoryStore

TURNS = {"simulated": 0.0}


class LostAnswerStore(MemoryStore):
    """Store that carries out calls, but loses their answers while `loses`."""

    loses = False

    async def claim_attempts(
        self, lane: Lane, *, owner: str, lease_s: float, limit: int, turns: Mapping[str, float] | None = None
    ) -> Sequence[Leased]:
        claimed_attempts = await super().claim_attempts(lane, owner=owner, lease_s=lease_s, limit=limit, turns=turns)
        if self.loses:
            raise StoreUnavailable("the commit's fate is unknown")
        return claimed_attempts


@pytest.fixture
def store() -> LostAnswerStore:
    return LostAnswerStore(ManualClock())


@pytest.fixture
async def attempt(store: LostAnswerStore) -> Attempt:
    return (await running(store))[0]


@pytest.fixture
def claims(store: LostAnswerStore) -> Claims:
    context = ControllerContext(
        installation=Installation("abcd"), owner="own", store=cast(Store, store), blobs=cast(Blobs, None),
        clock=ManualClock(), providers={},
    )  # fmt: skip
    return Claims(context, Lane.LIVENESS)


async def taken(claims: Claims) -> Sequence[Leased]:
    async with claims.leased(limit=9, turns=TURNS) as leased:
        return leased


async def test_rows_leased_by_a_claim_without_an_answer_are_claimed_again(
    store: LostAnswerStore, attempt: Attempt, claims: Claims
) -> None:
    store.loses = True
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await taken(claims)
    store.loses = False
    (again,) = await taken(claims)
    assert again.attempt.id == attempt.id
    assert not await taken(claims)  # it is known to be leased


async def test_a_row_that_could_not_be_written_is_due_at_once(
    store: LostAnswerStore, attempt: Attempt, claims: Claims
) -> None:
    with pytest.raises(StoreUnavailable):
        async with claims.leased(limit=9, turns=TURNS):
            raise StoreUnavailable("no answer, nothing was written")
    (again,) = await taken(claims)
    assert again.attempt.id == attempt.id


async def test_one_of_several_writes_without_an_answer_leaves_no_lease_behind(
    store: LostAnswerStore, attempt: Attempt, claims: Claims
) -> None:
    def write() -> None:
        with claims.writing():
            raise StoreUnavailable("the commit's fate is unknown")

    async with claims.leased(limit=9, turns=TURNS):
        with pytest.raises(StoreUnavailable):
            write()
    (again,) = await taken(claims)
    assert again.attempt.id == attempt.id


async def test_row_blocked_by_cloud_or_blobs_stays_leased_for_a_while(
    store: LostAnswerStore, attempt: Attempt, claims: Claims
) -> None:
    """The row's lease lapses, so that a broker that reaches the cloud or the blobs has its turn."""
    with pytest.raises(BlobsUnavailable):
        async with claims.leased(limit=9, turns=TURNS):
            raise BlobsUnavailable("the blob store does not answer")
    assert not await taken(claims)
    assert not await store.claim_attempts(Lane.LIVENESS, owner="other", lease_s=HOUR, limit=9, turns=TURNS)

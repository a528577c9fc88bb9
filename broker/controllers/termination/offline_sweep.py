"""The sweep without a daemon: what stands in the clouds under our name, and who answers for it.

With the database at hand this is the daemon's own judgement. Without it, only one thing can be known: whether some
broker of this installation lives, by its lease in the blob store. While one does, nothing is touched; when none does,
nobody answers for anything.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from broker.controllers.termination.orphan_sweep import bought
from broker.domain.errors import BlobsUnavailable, Gone, ProviderError
from broker.domain.ids import Installation, attempt_of
from broker.domain.instance import InstanceState, Observed
from broker.lifecycle.orphans import orphans, spared_message
from broker.ports import Blobs, Clock, Provider, Store
from broker.runtime.peers import lease_is_renewed
from trainer.contract import object_keys as keys

LOOK_S = 5.0
ABSENT_S = 180.0


@dataclass(frozen=True, kw_only=True)
class FoundMachine:
    """One machine of ours. `orphan`: why nobody answers for it; empty: somebody does, or may."""

    provider: str
    observed: Observed
    orphan: str
    spared: str = ""
    """Why the daemon's sweep would only report it; empty: it would destroy it."""
    since: datetime | None = None
    """Its creation as the cloud tells it, else when its create was sent; None: nobody knows."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    machines: tuple[FoundMachine, ...]
    silent: Mapping[str, str]
    """Clouds that did not answer, with what they said: nothing is known of them."""
    judged_by: str


async def survey(
    installation: Installation,
    providers: Mapping[str, Provider],
    clock: Clock,
    *,
    store: Store | None,
    blobs: Blobs,
    watch_s: float,
) -> Survey:
    """`watch_s`: for so long the lease is watched where there is no database. Raises StoreUnavailable."""
    seen: list[tuple[str, Observed]] = []
    silent: dict[str, str] = {}
    answers = await asyncio.gather(*(p.list() for p in providers.values()), return_exceptions=True)
    for name, answer in zip(providers, answers, strict=True):
        if isinstance(answer, ProviderError | TimeoutError | OSError):
            silent[name] = str(answer) or type(answer).__name__
        elif isinstance(answer, BaseException):
            raise answer
        else:
            ours = (o for o in answer if attempt_of(installation, o.handle.name) is not None)
            seen += [(name, o) for o in ours if o.state is not InstanceState.GONE]
    judged, judged_by = await _judge(installation, seen, clock, store, blobs, watch_s)
    answered = (FoundMachine(provider=name, observed=o, orphan="", since=o.created_at) for name, o in seen)
    machines = tuple(replace(judged.get(_key(one.observed), one), provider=one.provider) for one in answered)
    return Survey(machines=machines, silent=silent, judged_by=judged_by)


async def _judge(
    installation: Installation,
    seen: Sequence[tuple[str, Observed]],
    clock: Clock,
    store: Store | None,
    blobs: Blobs,
    watch_s: float,
) -> tuple[Mapping[tuple[str, str], FoundMachine], str]:
    """(what nobody answers for, by cloud and id; who says so)"""
    if not seen:
        return {}, "nothing stands"
    if store is not None:
        return await _by_the_database(installation, seen, store, blobs), "the database"
    if blobs.local:
        return {}, "nobody: neither a database nor a shared blob store is at hand, so nothing is known"
    try:
        if await blobs.get(keys.BROKER_LEASE) is None:
            return {}, "nobody: no broker has ever touched a lease in this blob store; is `blobs` that of the daemon?"
        lives = await lease_is_renewed(blobs, clock, watch_s)
    except BlobsUnavailable as e:
        return {}, f"nobody: the blob store cannot be read, so nothing is known ({e})"
    if lives:
        return {}, "the lease in the blob store: a broker lives and answers for them"
    gone = f"no broker has touched its lease for {watch_s:.0f} s"
    by_lease = {_key(o): FoundMachine(provider=name, observed=o, orphan=gone, since=o.created_at) for name, o in seen}
    return by_lease, "the lease in the blob store"


def _key(machine: Observed) -> tuple[str, str]:
    return machine.handle.provider, machine.handle.id


async def _by_the_database(
    installation: Installation, seen: Sequence[tuple[str, Observed]], store: Store, blobs: Blobs
) -> Mapping[tuple[str, str], FoundMachine]:
    """As the daemon's own sweep judges."""
    ids = [a for _, o in seen if (a := attempt_of(installation, o.handle.name)) is not None]
    found = {}
    for one in orphans(installation, [o for _, o in seen], await store.attempts_by_id(ids)):
        sent = one.attempt.create_sent_at if one.attempt else None
        ours = None if one.attempt else await bought(blobs, one)
        found[_key(one.observed)] = FoundMachine(
            provider=one.observed.handle.provider,
            observed=one.observed,
            orphan=one.why,
            spared=spared_message(one, report_only=False, bought=ours) or "",
            since=one.observed.created_at or sent,
        )
    return found


async def destroy(found: FoundMachine, provider: Provider, clock: Clock) -> str | None:
    """Until the cloud itself says absent, in two listings a list lag apart; else why not, in one line."""
    until, absent_at = clock.monotonic() + ABSENT_S + provider.caps.list_lag_s, None
    said = "the cloud still lists it"
    while clock.monotonic() < until:
        try:
            if absent_at is None:
                await _ask(provider, found)
            listed = any(
                o.handle.id == found.observed.handle.id and o.state is not InstanceState.GONE
                for o in await provider.list()
            )
        except ProviderError as e:
            said, listed = str(e), True
        now = clock.monotonic()
        absent_at = None if listed else (now if absent_at is None else absent_at)
        if absent_at is not None and now - absent_at >= provider.caps.list_lag_s:
            return None
        await clock.sleep(min(LOOK_S, max(0.1, provider.caps.list_lag_s)))
    return said


async def _ask(provider: Provider, found: FoundMachine) -> None:
    try:
        await provider.destroy(found.observed.handle)
    except Gone:
        return

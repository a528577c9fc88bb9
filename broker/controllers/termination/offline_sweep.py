"""Sweep without a daemon: lists the installation's machines, and judges which of them are orphans.

With a database, the judgement is the daemon's own. Without it, only the lease in the blob store shows whether a broker
of this installation is alive. While a broker is alive, the sweep destroys no machine. Otherwise every machine is an
orphan.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum

from broker.controllers.termination.orphan_facts import was_bought
from broker.domain.errors import BlobsUnavailable, Gone, ProviderError
from broker.domain.ids import Installation, attempt_of
from broker.domain.instance import InstanceState, Observed
from broker.lifecycle.orphans import Orphan, orphans, spared_message
from broker.ports import Blobs, Clock, Provider, Store
from broker.runtime.peers import lease_is_renewed
from trainer.contract import object_keys

POLL_S = 5.0
ABSENT_S = 180.0


@dataclass(frozen=True, kw_only=True)
class FoundMachine:
    """Machine of the installation. `orphan`: why the machine is an orphan; empty: it is not one, or this is unknown."""

    provider: str
    observed: Observed
    orphan: str
    spared: str = ""
    """Reason why the daemon's sweep would only report the machine; empty: the sweep would destroy the machine."""
    since: datetime | None = None
    """Creation time by the cloud, otherwise the time of its create; None: unknown."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    machines: tuple[FoundMachine, ...]
    silent: Mapping[str, str]
    """Errors of clouds that did not answer, by cloud name. The machines of these clouds are unknown."""
    judged_by: str
    """Source of the judgement, in words."""


class LeaseState(Enum):
    """State of the brokers' lease in the blob store, with the source of the judgement that follows from it."""

    NOT_READ = "the database"
    NOT_SHARED = "none: there is neither a database nor a shared blob store, so orphans are unknown"
    UNREADABLE = "none: the blob store cannot be read, so orphans are unknown"
    NEVER_RENEWED = "none: no broker has ever renewed a lease in this blob store; is `blobs` that of the daemon?"
    RENEWED = "the lease in the blob store: a live broker owns them"
    EXPIRED = "the lease in the blob store"


@dataclass(frozen=True, kw_only=True)
class SurveyFacts:
    """All facts of a survey. `listed`: the installation's machines, each after the name of its cloud."""

    listed: tuple[tuple[str, Observed], ...]
    silent: Mapping[str, str]
    lease: LeaseState = LeaseState.NOT_READ
    lease_error: str = ""
    orphans: tuple[tuple[Orphan, bool | None], ...] = ()
    """Orphans by the database, each with whether the blob store has its purchase (None: unknown or not needed)."""
    watch_s: float


async def survey(
    installation: Installation,
    providers: Mapping[str, Provider],
    clock: Clock,
    *,
    store: Store | None,
    blobs: Blobs,
    watch_s: float,
) -> Survey:
    """List and judge all machines. Raises StoreUnavailable.

    `watch_s`: seconds for which the lease is watched if there is no database.
    """
    listed, silent = await _listed(installation, providers)
    facts = SurveyFacts(listed=listed, silent=silent, watch_s=watch_s)
    if listed and store is not None:
        facts = replace(facts, orphans=await _orphans(installation, listed, store, blobs))
    elif listed:
        lease, error = await _lease(blobs, clock, watch_s)
        facts = replace(facts, lease=lease, lease_error=error)
    return judge(facts)


def judge(facts: SurveyFacts) -> Survey:
    """Return each machine with the judgement about it."""
    return Survey(
        machines=tuple(_judged(name, machine, facts) for name, machine in facts.listed),
        silent=facts.silent,
        judged_by=_source(facts),
    )


def _source(facts: SurveyFacts) -> str:
    if not facts.listed:
        return "no machine exists"
    return f"{facts.lease.value} ({facts.lease_error})" if facts.lease_error else facts.lease.value


def _judged(provider: str, machine: Observed, facts: SurveyFacts) -> FoundMachine:
    unjudged = FoundMachine(provider=provider, observed=machine, orphan="", since=machine.created_at)
    if facts.lease is LeaseState.EXPIRED:
        return replace(unjudged, orphan=f"no broker has renewed its lease for {facts.watch_s:.0f} s")
    for orphan, is_bought in facts.orphans:
        if orphan.observed.handle == machine.handle:
            sent = orphan.attempt.create_sent_at if orphan.attempt else None
            spared = spared_message(orphan, report_only=False, was_bought=is_bought) or ""
            return replace(unjudged, orphan=orphan.why, spared=spared, since=machine.created_at or sent)
    return unjudged


async def _listed(
    installation: Installation, providers: Mapping[str, Provider]
) -> tuple[tuple[tuple[str, Observed], ...], Mapping[str, str]]:
    """Return the installation's machines with their clouds, and the errors of the clouds that did not answer."""
    listed: list[tuple[str, Observed]] = []
    silent: dict[str, str] = {}
    answers = await asyncio.gather(*(p.list() for p in providers.values()), return_exceptions=True)
    for name, answer in zip(providers, answers, strict=True):
        if isinstance(answer, ProviderError | TimeoutError | OSError):
            silent[name] = str(answer) or type(answer).__name__
        elif isinstance(answer, BaseException):
            raise answer
        else:
            own_machines = (o for o in answer if attempt_of(installation, o.handle.name) is not None)
            listed += [(name, o) for o in own_machines if o.state is not InstanceState.GONE]
    return tuple(listed), silent


async def _orphans(
    installation: Installation, listed: Sequence[tuple[str, Observed]], store: Store, blobs: Blobs
) -> tuple[tuple[Orphan, bool | None], ...]:
    """Return the orphans by the database, as the daemon's own sweep finds them."""
    ids = [a for _, o in listed if (a := attempt_of(installation, o.handle.name)) is not None]
    machines, attempts = [o for _, o in listed], await store.attempts_by_id(ids)
    return tuple(
        [
            (orphan, None if orphan.attempt else await was_bought(blobs, orphan))
            for orphan in orphans(installation, machines, attempts)
        ]
    )


async def _lease(blobs: Blobs, clock: Clock, watch_s: float) -> tuple[LeaseState, str]:
    """Return the state of the lease, which is watched for `watch_s` seconds, and the error of the blob store."""
    if blobs.local:
        return LeaseState.NOT_SHARED, ""
    try:
        if await blobs.get(object_keys.BROKER_LEASE) is None:
            return LeaseState.NEVER_RENEWED, ""
        return (LeaseState.RENEWED if await lease_is_renewed(blobs, clock, watch_s) else LeaseState.EXPIRED), ""
    except BlobsUnavailable as e:
        return LeaseState.UNREADABLE, str(e)


async def destroy(machine: FoundMachine, provider: Provider, clock: Clock) -> str | None:
    """Destroy a machine until two listings, a list lag apart, omit it. Return why that failed; None: it is gone."""
    until, absent_at = clock.monotonic() + ABSENT_S + provider.caps.list_lag_s, None
    error = "the cloud still lists it"
    while clock.monotonic() < until:
        try:
            if absent_at is None:
                await _request_destroy(provider, machine)
            is_listed = any(
                o.handle.id == machine.observed.handle.id and o.state is not InstanceState.GONE
                for o in await provider.list()
            )
        except ProviderError as e:
            error, is_listed = str(e), True
        now = clock.monotonic()
        absent_at = None if is_listed else (now if absent_at is None else absent_at)
        if absent_at is not None and now - absent_at >= provider.caps.list_lag_s:
            return None
        await clock.sleep(min(POLL_S, max(0.1, provider.caps.list_lag_s)))
    return error


async def _request_destroy(provider: Provider, machine: FoundMachine) -> None:
    try:
        await provider.destroy(machine.observed.handle)
    except Gone:
        return

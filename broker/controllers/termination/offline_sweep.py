"""Sweep without a daemon: lists the installation's machines, and judges which of them are orphans.

With a database, the judgement is the daemon's own. Without it, only the lease in the blob store shows whether a broker
of this installation is alive. While a broker is alive, the sweep destroys no machine. Otherwise every machine is an
orphan.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from broker.controllers.termination.orphan_facts import bought
from broker.domain.errors import BlobsUnavailable, Gone, ProviderError
from broker.domain.ids import Installation, attempt_of
from broker.domain.instance import InstanceState, Observed
from broker.lifecycle.orphans import orphans, spared_message
from broker.ports import Blobs, Clock, Provider, Store
from broker.runtime.peers import lease_is_renewed
from trainer.contract import object_keys

LOOK_S = 5.0
ABSENT_S = 180.0


@dataclass(frozen=True, kw_only=True)
class FoundMachine:
    """One machine of the installation. `orphan`: why it is an orphan; empty: it is no orphan, or that is unknown."""

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
    listed: list[tuple[str, Observed]] = []
    silent: dict[str, str] = {}
    answers = await asyncio.gather(*(p.list() for p in providers.values()), return_exceptions=True)
    for name, answer in zip(providers, answers, strict=True):
        if isinstance(answer, ProviderError | TimeoutError | OSError):
            silent[name] = str(answer) or type(answer).__name__
        elif isinstance(answer, BaseException):
            raise answer
        else:
            ours = (o for o in answer if attempt_of(installation, o.handle.name) is not None)
            listed += [(name, o) for o in ours if o.state is not InstanceState.GONE]
    judged, judged_by = await _judge(installation, listed, clock, store, blobs, watch_s)
    answered = (FoundMachine(provider=name, observed=o, orphan="", since=o.created_at) for name, o in listed)
    machines = tuple(
        replace(judged.get(_key(machine.observed), machine), provider=machine.provider) for machine in answered
    )
    return Survey(machines=machines, silent=silent, judged_by=judged_by)


async def _judge(
    installation: Installation,
    listed: Sequence[tuple[str, Observed]],
    clock: Clock,
    store: Store | None,
    blobs: Blobs,
    watch_s: float,
) -> tuple[Mapping[tuple[str, str], FoundMachine], str]:
    """Return the orphans by cloud and id, and the source of the judgement."""
    if not listed:
        return {}, "no machine exists"
    if store is not None:
        return await _by_the_database(installation, listed, store, blobs), "the database"
    if blobs.local:
        return {}, "none: there is neither a database nor a shared blob store, so orphans are unknown"
    try:
        if await blobs.get(object_keys.BROKER_LEASE) is None:
            return {}, "none: no broker has ever renewed a lease in this blob store; is `blobs` that of the daemon?"
        is_alive = await lease_is_renewed(blobs, clock, watch_s)
    except BlobsUnavailable as e:
        return {}, f"none: the blob store cannot be read, so orphans are unknown ({e})"
    if is_alive:
        return {}, "the lease in the blob store: a live broker owns them"
    gone = f"no broker has renewed its lease for {watch_s:.0f} s"
    by_lease = {_key(o): FoundMachine(provider=name, observed=o, orphan=gone, since=o.created_at) for name, o in listed}
    return by_lease, "the lease in the blob store"


def _key(machine: Observed) -> tuple[str, str]:
    return machine.handle.provider, machine.handle.id


async def _by_the_database(
    installation: Installation, listed: Sequence[tuple[str, Observed]], store: Store, blobs: Blobs
) -> Mapping[tuple[str, str], FoundMachine]:
    """Judge as the daemon's own sweep does."""
    ids = [a for _, o in listed if (a := attempt_of(installation, o.handle.name)) is not None]
    judged = {}
    for orphan in orphans(installation, [o for _, o in listed], await store.attempts_by_id(ids)):
        sent = orphan.attempt.create_sent_at if orphan.attempt else None
        ours = None if orphan.attempt else await bought(blobs, orphan)
        judged[_key(orphan.observed)] = FoundMachine(
            provider=orphan.observed.handle.provider,
            observed=orphan.observed,
            orphan=orphan.why,
            spared=spared_message(orphan, report_only=False, bought=ours) or "",
            since=orphan.observed.created_at or sent,
        )
    return judged


async def destroy(machine: FoundMachine, provider: Provider, clock: Clock) -> str | None:
    """Destroy a machine until two listings, a list lag apart, omit it. Return why that failed; None: it is gone."""
    until, absent_at = clock.monotonic() + ABSENT_S + provider.caps.list_lag_s, None
    error = "the cloud still lists it"
    while clock.monotonic() < until:
        try:
            if absent_at is None:
                await _ask(provider, machine)
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
        await clock.sleep(min(LOOK_S, max(0.1, provider.caps.list_lag_s)))
    return error


async def _ask(provider: Provider, machine: FoundMachine) -> None:
    try:
        await provider.destroy(machine.observed.handle)
    except Gone:
        return

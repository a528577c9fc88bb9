"""Planted mutants: one rule or function of the product replaced each. Each must break an invariant *by its name*."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from unittest.mock import patch

from broker.controllers import boot, deadman, house_clock, inventory, launch, launchers, termination, through
from broker.controllers.beats import Beats
from broker.decide import billing as money
from broker.decide import liveness as life
from broker.decide.launch import judge_launching
from broker.decide.lifecycle import AttemptEvent
from broker.domain.errors import BlobsUnavailable
from broker.domain.ids import AttemptId, JobId, attempt_id, instance_name
from broker.domain.instance import Liveness
from broker.domain.job import JobState, Reason
from broker.store import fences, memory, memory_state, memory_tenant
from tests.sim.faults import OF_BROKERS, Fault
from tests.sim.loop import WHO
from tests.sim.run import simulate

Patches = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """`caught_by`: any of these invariants; another one, or a crash, does not count."""

    name: str
    caught_by: tuple[str, ...]
    patches: Patches
    aim: tuple[Fault, ...] | None = None
    """The faults that lead to what it breaks, instead of those that a seed draws."""

    @contextmanager
    def planted(self) -> Iterator[None]:
        running = [patch(target, new) for target, new in self.patches]
        for one in running:
            one.start()
        try:
            yield
        finally:
            for one in running:
                one.stop()


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


# --- creating


async def _create_first(self: launch.Launch, leased: list[Any]) -> None:
    """No intent: the create is sent before the row says so."""
    for one in leased:
        if self._never_sent(one) is None:
            self._start(one)
    await _SEND(self, leased)


_SEND = launch.Launch._send


async def _fresh_name(self: launch.Launch, one: Any) -> None:
    attempt = one.attempt
    name = instance_name(self._context.installation, attempt_id(attempt.job_id, 1000 + attempt.epoch))
    await _CREATE(self, replace(one, attempt=replace(attempt, name=name)))


_CREATE = launch.Launch._create


def _create_again(attempt: Any, seen: Any, caps: Any, now: datetime) -> AttemptEvent | None:
    return _JUDGE(attempt, seen, caps, now) or (None if seen.seen else AttemptEvent.ABSENT)


_JUDGE = judge_launching


# --- proofs


async def _through_at_once(self: through.Through, attempt: Any) -> bool:
    return True


async def _dead_at_once(self: launchers.Launchers, attempt: Any) -> float | None:
    key = (attempt.id, attempt.launched_by, False)
    return self._dead_since.setdefault(key, self._context.clock.monotonic())


def _one_absence(self: inventory.Inventory, provider: str, since: float, shows: Any, **_: Any) -> datetime | None:
    for listing in self._listings[provider]:
        if listing.begun > since and not shows(listing):
            return self._by_the_wall(listing.answered)
    return None


def _no_lag(self: inventory.Inventory, provider: str, since: float, shows: Any, **_: Any) -> datetime | None:
    without: list[Any] = []
    for listing in self._listings[provider]:
        if listing.begun > since:
            without = [] if shows(listing) else [*without, listing]
    return self._by_the_wall(without[1].answered) if len(without) >= 2 else None


def _first_left_out(self: inventory.Inventory, provider: str, since: float, shows: Any, **_: Any) -> datetime | None:
    """Charged up to the first listing of the proof, which may have left out what stood there."""
    if _ABSENT_SINCE(self, provider, since, shows) is None:
        return None
    without: list[Any] = []
    for listing in self._listings[provider]:
        if listing.begun > since:
            without = [] if shows(listing) else [*without, listing]
    return self._by_the_wall(without[0].answered)


def _any_time(self: inventory.Inventory, provider: str, since: float, shows: Any, **_: Any) -> datetime | None:
    return _ABSENT_SINCE(self, provider, float("-inf"), shows)


_ABSENT_SINCE = inventory.Inventory._absent_since


def _left_out_once(self: inventory.Inventory, provider: str, name: Any, since: float) -> bool:
    listing = self.latest(provider)
    return listing is not None and not listing.shows(name)


async def _give_up(self: termination.Termination, one: Any, *, launcher_dead: bool) -> Any:
    change = await _DESTROY(self, one, launcher_dead=launcher_dead)
    assert change.attempt is not None
    failed = change.attempt[1].destroy_failures > one.attempt.destroy_failures
    return self._settle(one, one.attempt, image_refused=False) if failed else change


_DESTROY = termination.Termination._destroy


async def _destroy_nothing(self: termination.Termination, one: Any, *, launcher_dead: bool) -> Any:
    with patch.object(termination.Termination, "_handles", _always(())):
        return await _DESTROY(self, one, launcher_dead=launcher_dead)


# --- life and death


def _unknown_is_dead(nodes: int, seen: Any, patience: Any) -> Liveness:
    found = _LIVENESS(nodes, seen, patience)
    return Liveness.DEAD if found is Liveness.UNKNOWN else found


_LIVENESS = life.liveness


def _silent_is_dead(nodes: int, seen: Any, patience: Any) -> Liveness:
    age_s = seen.beat_age_s or 0.0
    return Liveness.DEAD if age_s > patience.lost_s else _LIVENESS(nodes, seen, patience)


async def _unreadable_is_silence(self: Beats) -> None:
    """The beats of before the outage stay, and age."""
    watched = dict(self._watched)
    try:
        await _REFRESH(self)
    except BlobsUnavailable:
        self._watched, self.readable = watched, True


_REFRESH = Beats.refresh


# --- money


def _local_now(self: house_clock.HouseClock) -> datetime:
    return self._own.now()


def _no_release(self: termination.Termination, *args: Any, **more: Any) -> Any:
    return replace(_SETTLE(self, *args, **more), ledger=())


_SETTLE = termination.Termination._settle


def _nothing_last(attempt: Any, until: datetime) -> Any:
    return replace(_LAST_CHARGE(attempt, until), usd=Decimal(0))


_LAST_CHARGE = termination._last_charge


def _same_job(job: Any, *args: Any, **more: Any) -> Any:
    return job


def _charge_twice(self: memory.MemoryStore, charge: Any) -> None:
    _CHARGE(self, charge)
    self._state.write_ledger(fences.entries_of(charge))


_CHARGE = memory.MemoryStore._charge


# --- leases and rows


async def _deaf_to_stops(self: Any, job_id: JobId, event: Any) -> Any:
    """The wish is written, and nobody is told."""
    with patch.object(memory_state.State, "signal", _always(None)):
        return await _REQUEST_STOP(self, job_id, event)


_REQUEST_STOP = memory_tenant.MemoryTenant.request_stop


def _lease_by_local_clock(self: Any, now: datetime) -> bool:
    process = WHO.get()
    return _CLAIMABLE(self, now + timedelta(seconds=process.skew_s if process else 0.0))


_CLAIMABLE = memory_state.Row.claimable


def _no_lease(self: Any, now: datetime) -> bool:
    return bool(self.due_at <= now) or self.lease_until is not None


async def _no_key(self: Any, job: Any, *, key: str | None, body_sha256: str, events: Any) -> Any:
    again = job.id in self._state.jobs
    other = replace(job, id=f"{job.id[:-1]}{len(self._state.jobs) % 10 or 'a'}") if again else job
    return await _SUBMIT(self, other, key=None, body_sha256=body_sha256, events=events)


_SUBMIT = memory_tenant.MemoryTenant.submit


async def _forget_recovering(self: Any, states: Any, **more: Any) -> Any:
    return await _CLAIM_JOBS(self, [one for one in states if one is not JobState.RECOVERING], **more)


_CLAIM_JOBS = memory.MemoryStore.claim_jobs


# --- the blob store


async def _no_transaction(self: deadman.Deadman) -> bool:
    self._seq += 1
    await self._context.blobs.put("broker/lease", str(self._seq).encode())
    return False


async def _spec_again(self: boot.Boot, attempt: Any, job: Any) -> None:
    spec = boot.attempt_spec(attempt, job, self.context, {})
    await self.context.blobs.put(f"attempts/{attempt.id}/spec.json", spec.model_dump_json().encode())


async def _secret_in_spec(self: boot.Boot, attempt: Any, job: Any) -> None:
    spec = boot.attempt_spec(replace(attempt), job, self.context, {})
    with_secret = spec.model_copy(update={"env": await self._secrets(job)})
    await self.context.blobs.put(f"attempts/{attempt.id}/spec.json", with_secret.model_dump_json().encode())


def _nearest_first(found: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(found))


def _all_objects(job: Any, kept: Any) -> list[str]:
    return [key for objects in kept.by_kind.values() for key in objects]


def _mutant(name: str, caught_by: str, *patches: tuple[str, Any], aim: tuple[Fault, ...] | None = None) -> Mutant:
    return Mutant(name=name, caught_by=tuple(caught_by.split()), patches=patches, aim=aim)


def _always_on(*kinds: str, share: float = 1.0) -> tuple[Fault, ...]:
    """Each for all brokers, from a while after the first jobs' beginning."""
    return tuple(
        Fault(kind=kind, at=100.0 if kind.startswith("blobs") else 0.0, for_s=1000.0, share=share, target=broker)
        for kind in kinds
        for broker in range(3 if kind in OF_BROKERS else 1)
    )


def _now_and_then(kind: str) -> tuple[Fault, ...]:
    return tuple(Fault(kind=kind, at=at, target=number) for number, at in enumerate((150.0, 300.0, 450.0, 800.0)))


C, D, S = "broker.controllers", "broker.decide", "broker.store"
TERMINATION, LAUNCH, INVENTORY = f"{C}.termination.Termination", f"{C}.launch.Launch", f"{C}.inventory.Inventory"
STORE, TENANT, ROW = f"{S}.memory.MemoryStore", f"{S}.memory_tenant.MemoryTenant", f"{S}.memory_state.Row"
MUTANTS = (
    _mutant("no intent row before the create", "intent_first create_once", (f"{LAUNCH}._send", _create_first)),
    _mutant("name chosen at call time", "intent_first", (f"{LAUNCH}._create", _fresh_name)),
    _mutant("create repeated on an unknown outcome", "create_once", (f"{C}.launch.judge_launching", _create_again)),
    _mutant(
        "a live launcher counts as dead", "ended_absent create_once",
        (f"{C}.launchers.Launchers.dead_since", _dead_at_once),
    ),
    _mutant(
        "any launcher is through", "launcher_at_rest", (f"{C}.through.Through._is_through", _through_at_once),
        aim=_always_on("people.stop_launch", "cloud.deaf", "cloud.slow_create"),
    ),
    _mutant("one listing proves absence", "ended_absent no_false_death", (f"{INVENTORY}._absent_since", _one_absence)),
    _mutant(
        "absence without the list lag", "ended_absent", (f"{INVENTORY}._absent_since", _no_lag),
        aim=(*_always_on("cloud.lost_reply", share=0.4), *_always_on("people.stop_birth")),
    ),
    _mutant("listings from before the death count", "ended_absent", (f"{INVENTORY}._absent_since", _any_time)),
    _mutant(
        "give up when destroy fails", "ended_absent", (f"{TERMINATION}._destroy", _give_up),
        aim=(*_always_on("cloud.5xx", share=0.5), *_now_and_then("stop")),
    ),
    _mutant("never destroyed", "live_state_ends drains", (f"{TERMINATION}._destroy", _destroy_nothing)),
    _mutant(
        "unknown is dead", "no_false_death", (f"{D}.liveness.liveness", _unknown_is_dead),
        aim=_now_and_then("silence"),
    ),
    _mutant(
        "what one listing leaves out is dead", "no_false_death", (f"{INVENTORY}.left_out", _left_out_once),
        aim=(*_now_and_then("silence"), *_always_on("cloud.list_omits", share=0.5)),
    ),
    _mutant("silence is death", "no_false_death", (f"{D}.liveness.liveness", _silent_is_dead)),
    _mutant(
        "an unreadable store is silence", "no_false_death", (f"{C}.beats.Beats.refresh", _unreadable_is_silence),
        aim=_always_on("blobs.down"),
    ),
    _mutant("sweep takes any name", "foreign_untouched", (f"{D}.sweep.attempt_of", lambda _, name: AttemptId(name))),
    _mutant("no sweep", "no_leak drains", (f"{C}.sweep.orphans", _always(()))),
    _mutant("charges are not cumulative", "spend_within_cap", (f"{C}.billing.owed", money.accrued)),
    _mutant("the cap is not watched", "spend_within_cap", (f"{D}.billing.cap_is_near", _always(False))),
    _mutant(
        "the cap has no lead", "spend_within_cap", (f"{D}.billing._lead_s", _always(0.0)),
        aim=(),
    ),
    _mutant(
        "money by the local clock", "spend_within_cap charged_in_full",
        (f"{C}.house_clock.HouseClock.now", _local_now),
    ),
    _mutant("nothing is released", "reservation_settled", (f"{TERMINATION}._settle", _no_release)),
    _mutant("no last charge", "charged_in_full", (f"{C}.termination._last_charge", _nothing_last)),
    _mutant(
        "one listing ends the bill", "charged_in_full", (f"{INVENTORY}._absent_since", _first_left_out),
        aim=(*_always_on("cloud.list_omits", "cloud.5xx", share=0.5), *_always_on("people.stop_birth")),
    ),
    _mutant("an entry is written twice", "ledger_adds_up", (f"{STORE}._charge", _charge_twice)),
    _mutant("unfenced writes", "fenced legal_step", (f"{S}.fences.holds", _always(True))),
    _mutant("no lease", "one_lease_holder", (f"{ROW}.claimable", _no_lease)),
    _mutant("leases by the local clock", "one_lease_holder", (f"{ROW}.claimable", _lease_by_local_clock)),
    _mutant("a job stays behind its attempt", "active_has_attempt", (f"{C}.termination.after_attempt", _same_job)),
    _mutant("idempotency keys are ignored", "one_job_a_key", (f"{TENANT}.submit", _no_key)),
    _mutant("recovering jobs are forgotten", "drains", (f"{STORE}.claim_jobs", _forget_recovering)),
    _mutant("teams see each other", "other_team_unseen", (f"{S}.memory_state.Part._sees", _always(True))),
    _mutant("a stop is not heard", "signal_is_heard drains", (f"{TENANT}.request_stop", _deaf_to_stops)),
    _mutant("a lease without a transaction", "lease_needs_database", (f"{C}.deadman.Deadman.step", _no_transaction)),
    _mutant(
        "spec.json is written again", "who_writes_what", (f"{C}.boot.Boot._put_spec", _spec_again),
        aim=_always_on("cloud.5xx", share=0.5),
    ),
    _mutant("a secret in spec.json", "no_secret", (f"{C}.boot.Boot._put_spec", _secret_in_spec)),
    _mutant("resumes from the first checkpoint", "resume_furthest", (f"{C}.placement.furthest_first", _nearest_first)),
    _mutant("retention deletes what is needed", "good_checkpoint_kept", (f"{C}.retention.leftovers", _all_objects)),
    _mutant("every end is a success", "success_is_real", (f"{C}.termination.end_reason", _always(Reason.COMPLETED))),
)  # fmt: skip


def hunt(mutant: Mutant, seeds: Sequence[int]) -> tuple[int | None, dict[str, int]]:
    """How many seeds it took to break what it is meant to break, and what holds without it; what else broke before."""
    others: dict[str, int] = {}
    for tried, seed in enumerate(seeds, 1):
        with mutant.planted():
            broken = simulate(seed, mutant.aim).violation
        if broken is not None and broken[0] in mutant.caught_by and simulate(seed, mutant.aim).violation is None:
            return tried, others
        if broken is not None:
            others[broken[0]] = others.get(broken[0], 0) + 1
    return None, others

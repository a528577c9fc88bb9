"""Planted mutants: each replaces one rule or function of the product, and must break an invariant named for it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

from broker.billing import accrual as money
from broker.domain.ids import AttemptId
from broker.domain.job import Reason
from broker.lifecycle.decisions.restored_decision import RestoredDecision
from tests.sim import wrong, wrong_ends, wrong_money
from tests.sim.faults import OF_BROKERS, Fault
from tests.sim.run import simulate

Patches = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """Bug to plant. `caught_by`: invariants of which one must break; another one, or a crash, does not count."""

    name: str
    caught_by: tuple[str, ...]
    patches: Patches
    aim: tuple[Fault, ...] | None = None
    """Faults that lead to the broken rule, in place of those that a seed draws; None: the seed's faults."""

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


def _mutant(name: str, caught_by: str, *patches: tuple[str, Any], aim: tuple[Fault, ...] | None = None) -> Mutant:
    return Mutant(name=name, caught_by=tuple(caught_by.split()), patches=patches, aim=aim)


def _always_on(*kinds: str, share: float = 1.0) -> tuple[Fault, ...]:
    """Return faults that affect all brokers, from some time after the first jobs begin."""
    return tuple(
        Fault(kind=kind, at=100.0 if kind.startswith("blobs") else 0.0, for_s=1000.0, share=share, target=broker)
        for kind in kinds
        for broker in range(3 if kind in OF_BROKERS else 1)
    )


def _again_and_again(kind: str) -> tuple[Fault, ...]:
    """Return faults that cover half of the time, for all brokers."""
    times = range(60, 1000, 90)
    return tuple(Fault(kind=kind, at=at, for_s=45.0, share=1.0, target=broker) for at in times for broker in range(3))


def _now_and_then(kind: str) -> tuple[Fault, ...]:
    return tuple(Fault(kind=kind, at=at, target=number) for number, at in enumerate((150.0, 300.0, 450.0, 800.0)))


ROT_AND_DEATH = tuple(
    Fault(kind=kind, at=at + after_s, target=number)
    for number, at in enumerate((200.0, 300.0, 400.0, 500.0, 600.0, 700.0, 800.0))
    for kind, after_s in (("rot", 0.0), ("preempt", 1.0))
)
LONG_AWAY = (Fault(kind="away", at=300.0, for_s=6000.0),)
BACK_TO_TRAINING = (*(Fault(kind="preempt", at=at, target=n) for n, at in enumerate((150.0, 180.0, 210.0, 240.0))),
                    Fault(kind="restored", at=100.0, for_s=400.0))  # fmt: skip
"""Faults that restore a backup after which machines were lost and others bought."""
BACK_TO_INTENT = (Fault(kind="restored", at=3.0, for_s=150.0),)
BACK_TO_LAUNCH = (Fault(kind="preempt", at=15.0), Fault(kind="restored", at=5.5, for_s=200.0))
PROVISIONING = "broker.controllers.provisioning"
OBSERVATION = "broker.controllers.observation"
BILLING = "broker.controllers.billing"
ENDS = "broker.controllers.termination"
LIFECYCLE = "broker.lifecycle"
DECISION, LAUNCH = f"{LIFECYCLE}.decisions.termination_decision", f"{PROVISIONING}.launch.Launch"
INVENTORY, PROOF = f"{OBSERVATION}.inventory.Inventory", f"{LIFECYCLE}.observation.proof"
STORE, TENANT = "tests.support.memory_store.store.MemoryStore", "tests.support.memory_store.tenant.MemoryTenant"
ROW = "tests.support.memory_store.state.MemoryRow"
MUTANTS = (
    _mutant("no intent row before the create", "intent_first create_once", (f"{LAUNCH}._send", wrong.create_first)),
    _mutant("name chosen at call time", "intent_first", (f"{LAUNCH}._create", wrong.fresh_name)),
    _mutant(
        "create repeated on an unknown outcome", "create_once",
        (f"{LIFECYCLE}.decisions.launch_decision.judge_launching", wrong.create_again),
    ),
    _mutant(
        "what is not listed was not bought", "one_machine_set",
        (f"{LIFECYCLE}.decisions.launch_decision.judge_launching", wrong.create_unseen),
        aim=_always_on("cloud.lost_reply", share=0.5),
    ),
    _mutant(
        "a live launcher counts as dead", "ended_absent create_once",
        (f"{PROVISIONING}.creates_in_flight.CreatesInFlight.dead_since", wrong.dead_at_once),
    ),
    _mutant(
        "any launcher is through", "launcher_at_rest",
        (f"{PROVISIONING}.launcher_completion.LauncherCompletion._has_finished", wrong.through_at_once),
        aim=_always_on("people.stop_launch", "cloud.dea", "cloud.slow_create"),
    ),
    _mutant(
        "one listing proves absence", "ended_absent no_false_death", (f"{PROOF}.proof_listing", wrong.one_absence),
    ),
    _mutant(
        "absence without the list lag", "ended_absent", (f"{PROOF}.proof_listing", wrong.no_lag),
        aim=(*_always_on("cloud.lost_reply", share=0.4), *_always_on("people.stop_birth")),
    ),
    _mutant("listings from before the death count", "ended_absent", (f"{PROOF}.proof_listing", wrong.any_time)),
    _mutant(
        "give up when destroy fails", "ended_absent", (f"{ENDS}.termination.after_destroy", wrong.give_up),
        aim=(*_always_on("cloud.5xx", share=0.5), *_now_and_then("stop")),
    ),
    _mutant(
        "who is cut off claims what others reach", "death_is_seen",
        (f"{INVENTORY}.turns", property(wrong.always({"simulated": 0.0}))),
        aim=(Fault(kind="cloud.cut", at=100.0, for_s=1000.0, share=1.0), *_now_and_then("preempt")),
    ),
    _mutant("never destroyed", "live_state_ends", (f"{DECISION}.all_handles", wrong.always(()))),
    _mutant(
        "unknown is dead", "no_false_death", (f"{LIFECYCLE}.liveness.liveness", wrong.unknown_is_dead),
        aim=_now_and_then("silence"),
    ),
    _mutant(
        "what one listing leaves out is dead", "no_false_death",
        (f"{PROOF}.missing_for_seconds", wrong.left_out_once),
        aim=(*_now_and_then("silence"), *_always_on("cloud.list_omits", share=0.5)),
    ),
    _mutant(
        "what one listing calls stopped is dead", "no_false_death",
        (f"{LIFECYCLE}.liveness.LivenessTimeouts.stopped_after_s", property(wrong.always(0.0))),
        aim=_always_on("cloud.list_stopped", share=0.6),
    ),
    _mutant(
        "what is stopped is waited for", "death_is_seen", (f"{LIFECYCLE}.liveness.liveness", wrong.stopped_lives),
        aim=_now_and_then("host_stops"),
    ),
    _mutant(
        "the first of several machines beats for all", "death_is_seen",
        (f"{OBSERVATION}.heartbeats.HeartbeatReader.peers_silent_s", wrong.always(0.0)),
        aim=_now_and_then("node_stops"),
    ),
    _mutant(
        "what is stopped is gone", "charged_in_full", (f"{LIFECYCLE}.observation.listing.Listing.shows", wrong.runs),
        aim=_now_and_then("host_stops"),
    ),
    _mutant("silence is death", "no_false_death", (f"{LIFECYCLE}.liveness.liveness", wrong.silent_is_dead)),
    _mutant(
        "last_modified against now", "no_false_death",
        (f"{OBSERVATION}.heartbeats.HeartbeatReader.refresh", wrong.age_by_date),
    ),
    _mutant(
        "an unreadable store is silence", "no_false_death",
        (f"{OBSERVATION}.heartbeats.HeartbeatReader.refresh", wrong.unreadable_is_silence),
        aim=_always_on("blobs.down"),
    ),
    _mutant(
        "sweep takes any name", "foreign_untouched",
        (f"{LIFECYCLE}.orphans.attempt_of", lambda _, name: AttemptId(name)),
    ),
    _mutant("no sweep", "no_leak", (f"{ENDS}.orphan_facts.orphans", wrong.always(()))),
    _mutant(
        "sweep without grace", "orphan_grace", (f"{ENDS}.orphan_sweep.decide_orphan", wrong.no_grace),
        aim=_now_and_then("late_machine"),
    ),
    _mutant(
        "charges are not cumulative", "spend_within_cap",
        (f"{LIFECYCLE}.decisions.charge_decision.uncharged_usd", money.accrued),
    ),
    _mutant(
        "the cap is not watched", "spend_within_cap", (f"{LIFECYCLE}.signals.cap_is_near", wrong.always(False)),
    ),
    _mutant(
        "the cap has no lead", "spend_within_cap", ("broker.billing.drain.lead_s", wrong.always(0.0)),
        aim=(),
    ),
    _mutant(
        "money by the local clock", "spend_within_cap charged_in_full not_overbilled",
        ("broker.runtime.clock.DatabaseClock.now", wrong.local_now),
    ),
    _mutant(
        "the price of the purchase is charged on", "charged_in_full",
        (f"{BILLING}.charges.price_changes", wrong.always(())), aim=_always_on("cloud.price_moves", share=2.0),
    ),
    _mutant(
        "a rise counts from when it was seen", "charged_in_full",
        (f"{BILLING}.charges.price_changes", wrong_money.rise_from_now),
        aim=(*_always_on("cloud.price_moves", share=2.0), *_again_and_again("store.down")),
    ),
    _mutant(
        "a price that stands still is believed to have fallen", "charged_in_full",
        (f"{BILLING}.charges.price_changes", wrong_money.all_prices_move),
        aim=_always_on("cloud.price_moves", share=2.0),
    ),
    _mutant(
        "no price falls", "not_overbilled",
        (f"{BILLING}.charges.price_changes", wrong_money.no_falls), aim=_always_on("cloud.price_moves", share=2.0),
    ),
    _mutant(
        "a machine too many is free", "charged_in_full",
        ("broker.billing.prices._ExtraMachines.at", wrong.always(0)), aim=_always_on("cloud.twice"),
    ),
    _mutant(
        "a machine too many is free once it is gone", "charged_in_full",
        (f"{INVENTORY}.machine_spans", wrong_money.only_listed_machines),
        aim=(*_always_on("cloud.twice", "cloud.short_life"), *_again_and_again("store.down")),
    ),
    _mutant(
        "what is beside tells of the attempt", "no_false_death",
        (f"{OBSERVATION}.attempt_observer.recorded_machines", lambda attempt, seen: seen),
        aim=_always_on("cloud.twice"),
    ),
    _mutant(
        "a machine too many stays", "no_leak",
        (f"{LIFECYCLE}.orphans._belongs", wrong.always(True)), aim=_always_on("cloud.twice"),
    ),
    _mutant(
        "what never booted is charged until its launcher is at rest", "not_overbilled",
        (f"{INVENTORY}.latest_possible_end", wrong.always(None)),
        aim=(*_always_on("launcher.unknown", "people.stop_birth"), *_always_on("cloud.lost_reply", share=0.5)),
    ),
    _mutant("nothing is released", "reservation_settled", (f"{DECISION}.close_ledger", wrong.no_release)),
    _mutant(
        "no last charge", "charged_in_full", (f"{DECISION}.uncharged_usd", wrong.always(Decimal(0))),
    ),
    _mutant(
        "one listing ends the bill", "charged_in_full", (f"{PROOF}.proof_listing", wrong.first_left_out),
        aim=(*_always_on("cloud.list_omits", "cloud.5xx", share=0.5), *_always_on("people.stop_birth")),
    ),
    _mutant(
        "what died young is billed until it could be listed", "charged_in_full",
        (f"{PROOF}.proof_listing", wrong.second_left_out),
        aim=(*_always_on("cloud.lost_reply", share=0.3), *_always_on("cloud.short_life", "people.stop_birth")),
    ),
    _mutant("the bill ends with its attempt", "not_overbilled", (f"{DECISION}.close_ledger", wrong.charged_to_the_end)),
    _mutant(
        "what is listed no more is charged on", "not_overbilled", (f"{INVENTORY}.missing_twice_at", wrong.always(None)),
        aim=(*_always_on("blobs.down"), *_now_and_then("preempt")),
    ),
    _mutant(
        "what stood alone is charged before its end", "not_overbilled",
        (f"{LIFECYCLE}.decisions.charge_decision.charged_until", wrong_money.charged_while_alone), aim=LONG_AWAY,
    ),
    _mutant(
        "an absence of all brokers is charged whole", "not_overbilled",
        (f"{BILLING}.metering.self_stopped_by", wrong.always(None)),
        (f"{ENDS}.termination_facts.self_stopped_by", wrong.always(None)), aim=LONG_AWAY,
    ),
    _mutant(
        "what stands on alone is free", "charged_in_full", (f"{INVENTORY}.last_listed_at", wrong.always(None)),
        aim=LONG_AWAY,
    ),
    _mutant(
        "what is kept for people is kept on", "live_state_ends",
        (f"{DECISION}.inspection_end", wrong_ends.kept_for_a_day), aim=_now_and_then("trainer_fails"),
    ),
    _mutant(
        "no last word is looked for that no beat tells of", "no_false_death",
        (f"{OBSERVATION}.attempt_observer.final_is_likely", wrong_ends.requires_final_heartbeat), aim=(),
    ),
    _mutant("reservation without lock", "budget_holds", (f"{STORE}._allowed", wrong.always(True)), aim=()),
    _mutant("an entry is written twice", "ledger_adds_up", (f"{STORE}._charge", wrong.charge_twice)),
    _mutant("unfenced writes", "fenced", ("broker.store.rules.fences.all_hold", wrong.always(True))),
    _mutant("no lease", "one_lease_holder", (f"{ROW}.claimable", wrong.no_lease)),
    _mutant("leases by the local clock", "one_lease_holder", (f"{ROW}.claimable", wrong.lease_by_local_clock)),
    _mutant("an admission is written twice", "one_live_attempt", (f"{STORE}._admit", wrong.admit_twice)),
    _mutant("answered before it is written", "no_job_lost", (f"{TENANT}.submit", wrong.answer_first)),
    _mutant(
        "a job is queued at once", "legal_step", (f"{DECISION}.after_attempt", wrong.queue_at_once),
    ),
    _mutant(
        "a job stays behind its attempt", "active_has_attempt", (f"{DECISION}.after_attempt", wrong.same_job),
    ),
    _mutant("idempotency keys are ignored", "one_job_a_key", (f"{TENANT}.submit", wrong.no_key)),
    _mutant("recovering jobs are forgotten", "drains", (f"{STORE}.claim_jobs", wrong.forget_recovering)),
    _mutant(
        "teams see each other", "other_team_unseen",
        ("tests.support.memory_store.state.MemoryPart._sees", wrong.always(True)),
    ),
    _mutant("a stop is not heard", "signal_is_heard", (f"{TENANT}.request_stop", wrong.deaf_to_stops)),
    _mutant(
        "a lease without a transaction", "lease_needs_database",
        ("broker.controllers.monitoring.dead_man_switch.Deadman.step", wrong.no_transaction),
    ),
    _mutant(
        "spec.json is written again", "who_writes_what", (f"{PROVISIONING}.boot_spec.Boot._put_spec", wrong.spec_again),
        aim=_always_on("cloud.5xx", share=0.5),
    ),
    _mutant(
        "a secret in spec.json", "no_secret", (f"{PROVISIONING}.boot_spec.Boot._put_spec", wrong.secret_in_spec),
    ),
    _mutant(
        "resumes from the first checkpoint", "resume_furthest",
        (f"{PROVISIONING}.placement.furthest_first", wrong.nearest_first),
    ),
    _mutant(
        "what another job has by now is not looked up", "resume_furthest",
        ("trainer.agent.base.prepare._elsewhere", AsyncMock(return_value=[])),
        aim=tuple(Fault(kind="preempt", at=100.0 + 33 * number, target=7 * number) for number in range(30)),
    ),
    _mutant(
        "resumes from anybody's checkpoint", "own_checkpoint",
        (f"{PROVISIONING}.placement.Placement._resume_from", wrong.anybodys),
    ),
    _mutant("manifest first", "manifest_last", ("trainer.checkpoint.protocol.commit", wrong.manifest_first)),
    _mutant(
        "files are not verified", "torn_never_loaded",
        ("trainer.objectstore.objects.Objects.download", wrong.unverified),
        aim=ROT_AND_DEATH,
    ),
    _mutant(
        "the step of another checkpoint", "resume_is_exact",
        ("trainer.checkpoint.protocol.restore", wrong.first_listed),
        aim=ROT_AND_DEATH,
    ),
    _mutant("the newest are pruned", "good_checkpoint_kept", ("trainer.checkpoint.protocol.prune", wrong.prune_newest)),
    _mutant(
        "trainers do not mind a lost broker", "broker_gone_stops",
        ("trainer.agent.dead_man_switch.DeadMan.expired", property(wrong.always(False))),
        aim=tuple(Fault(kind="store.down", at=150.0, for_s=1000.0, share=1.0, target=broker) for broker in range(3)),
    ),
    _mutant(
        "a rule that breaks", "no_internal_error",
        (f"{BILLING}.metering.moved_prices", Mock(side_effect=ZeroDivisionError)),
    ),
    _mutant(
        "retention deletes what is needed", "good_checkpoint_kept",
        (f"{LIFECYCLE}.decisions.retention_decision.leftovers", wrong.all_objects),
    ),
    _mutant(
        "heirs are not asked about", "good_checkpoint_kept",
        ("tests.support.memory_store.job_data.MemoryGlobalJobData.unfinished_dependent", wrong.no_protected_job),
        aim=_now_and_then("preempt"),
    ),
    _mutant(
        "numbers after a backup's are issued again", "issued_once",
        (f"{OBSERVATION}.restored_attempts.decide_restored", wrong.always(RestoredDecision())),
        aim=BACK_TO_TRAINING,
    ),
    _mutant(
        "the sweep ends what a backup does not know", "spared_stands",
        (f"{LIFECYCLE}.decisions.orphan_decision.spared_message", wrong.always(None)), aim=BACK_TO_TRAINING,
    ),
    _mutant(
        "an intent of a backup was never sent", "one_machine_set no_leak",
        (f"{OBSERVATION}.restored_attempts.RestoredAttempts.was_sent", AsyncMock(return_value=False)),
        aim=BACK_TO_INTENT,
    ),
    _mutant(
        "nothing follows a launch of a backup", "one_machine_set",
        (f"{OBSERVATION}.restored_attempts.RestoredAttempts.was_superseded", AsyncMock(return_value=False)),
        aim=BACK_TO_LAUNCH,
    ),
    _mutant(
        "one commit is enough", "good_checkpoint_kept",
        (f"{LIFECYCLE}.decisions.retention_decision.superseded", wrong.one_is_enough),
    ),
    _mutant("a move without a drain", "move_drains", (f"{LIFECYCLE}.state_machine.ATTEMPT_RULES", wrong_ends.no_drain)),
    _mutant("a move uses up a retry", "move_is_free", (f"{LIFECYCLE}.transitions.FREE_RETRIES", frozenset[Reason]())),
    _mutant(
        "a retry is counted twice", "retry_is_counted_once",
        (f"{DECISION}.after_attempt", wrong_ends.count_retries_twice),
    ),
    _mutant(
        "a preemption uses up a retry", "retry_is_counted_once",
        (f"{DECISION}.after_attempt", wrong_ends.count_preemptions), aim=_now_and_then("preempt"),
    ),
    _mutant(
        "every end is a success", "success_is_real", (f"{DECISION}.end_reason", wrong.always(Reason.COMPLETED)),
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Hunt:
    """Result of a hunt. `tried`: number of seeds until the catch; None: no catch. `others`: other rules that broke
    before.
    """

    tried: int | None
    by: str
    others: dict[str, int]


def hunt(mutant: Mutant, seeds: Sequence[int]) -> Hunt:
    """Simulate until the mutant breaks a rule that it should break and that holds without it."""
    others: dict[str, int] = {}
    for tried, seed in enumerate(seeds, 1):
        with mutant.planted():
            broken = simulate(seed, mutant.aim).violation
        if broken is not None and broken[0] in mutant.caught_by and simulate(seed, mutant.aim).violation is None:
            return Hunt(tried=tried, by=broken[0], others=others)
        if broken is not None:
            others[broken[0]] = others.get(broken[0], 0) + 1
    return Hunt(tried=None, by="", others=others)

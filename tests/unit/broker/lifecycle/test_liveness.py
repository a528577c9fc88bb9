"""Unknown is never treated as dead, and a false death is never declared."""

import math
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.domain.instance import InstanceState, Liveness, Observed
from broker.domain.job import AttemptState, Handle
from broker.domain.offer import GIB
from broker.lifecycle.liveness import (
    TAKEN_AWAY,
    AttemptObservation,
    LivenessTimeouts,
    fault_message,
    judge,
    liveness,
    mismatch_message,
    poll_share,
    progress_of,
    recorded_machines,
)
from broker.lifecycle.state_machine import AttemptEvent
from tests.support import build
from trainer.contract.documents import CheckpointRef, Final, Heartbeat, Outcome

TIMEOUTS = LivenessTimeouts()
BEAT = Heartbeat(attempt="x", boot="b", seq=1, phase="training", step=3)
NOTICED = BEAT.model_copy(update={"notice_s": 9.0})


def machine(state: InstanceState = InstanceState.RUNNING, **changes: Any) -> Observed:
    attempt = build.attempt()
    own = Observed(handle=Handle(provider="simulated", id="i-1", name=attempt.name), state=state)
    return replace(own, **changes)


def verdict(state: AttemptState = AttemptState.TRAINING, at: float = 10, **seen: Any) -> AttemptEvent | None:
    return judge(build.attempt(state), AttemptObservation(**seen), build.at(at), TIMEOUTS, 600)


observations = st.builds(
    AttemptObservation,
    beat=st.none() | st.just(BEAT),
    beat_age_s=st.none() | st.floats(0, 5000),
    progress_age_s=st.none() | st.floats(0, 5000),
    listed=st.lists(st.sampled_from(InstanceState).map(machine), max_size=2).map(tuple),
    absent=st.booleans(),
    missing_from_listings=st.booleans(),
    store_ok_s=st.none() | st.floats(0, 1e4),
)


@given(observations)
def test_death_is_only_declared_by_the_cloud(seen: AttemptObservation) -> None:
    states = {o.state for o in seen.listed}
    dead = liveness(1, seen, TIMEOUTS) is Liveness.DEAD
    assert not dead or TAKEN_AWAY & states or ((seen.absent or seen.missing_from_listings) and not states)


@given(observations)
def test_a_beating_attempt_survives_whatever_listings_omit(seen: AttemptObservation) -> None:
    fresh = seen.beat_age_s is not None and seen.beat_age_s < TIMEOUTS.three_beats_s
    if fresh and not TAKEN_AWAY & {o.state for o in seen.listed}:
        assert liveness(1, seen, TIMEOUTS) is Liveness.ALIVE


def test_an_extra_machine_does_not_change_the_verdict() -> None:
    """The extra machine is destroyed, stays listed as gone for an hour, and may report its own end."""
    beside = Handle(provider="simulated", id="i-2", name=build.attempt().name)
    shown = (machine(), machine(InstanceState.GONE, handle=beside))
    one = replace(build.attempt(AttemptState.TRAINING), handles=(machine().handle,))
    assert recorded_machines(one, shown) == (machine(),)
    assert recorded_machines(replace(one, handles=()), shown) == shown
    assert recorded_machines(replace(one, line=replace(one.line, nodes=2)), shown) == shown, (
        "the other one is not recorded yet"
    )


@given(observations, st.sampled_from([AttemptState.BOOTING, AttemptState.TRAINING, AttemptState.DRAINING]))
def test_an_outage_of_our_own_store_makes_no_attempt_hung(seen: AttemptObservation, state: AttemptState) -> None:
    event = judge(build.attempt(state), seen, build.at(10), TIMEOUTS, 600)
    assert event is not AttemptEvent.HUNG or seen.store_ok


@pytest.mark.parametrize(
    ("seen", "dead"),
    [
        ({"beat_age_s": 15.0}, True),
        ({"beat_age_s": 14.9}, False),  # three beats are not missing yet
        ({"beat_age_s": None}, False),  # no heartbeat was observed: an agent that starts
        ({"beat_age_s": 15.0, "store_ok_s": None}, False),
        ({"beat_age_s": 15.0, "listed": (machine(),)}, False),
        ({"beat_age_s": 15.0, "missing_from_listings": False}, False),
    ],
)
def test_an_unlisted_machine_is_dead_after_three_missed_heartbeats(seen: dict[str, Any], dead: bool) -> None:
    found = liveness(1, AttemptObservation(**{"missing_from_listings": True} | seen), TIMEOUTS)
    assert (found is Liveness.DEAD) == dead


@pytest.mark.parametrize(
    ("seen", "share"),
    [
        ({"beat_age_s": 7.4}, 0.0),
        ({"beat_age_s": 7.5}, 1.0),
        ({"beat_age_s": 7.5, "listed": (machine(),)}, 0.5),
        ({"beat_age_s": 60.0, "listed": (machine(),)}, 0.0),
        ({"beat_age_s": 60.0}, 1.0),
        ({"beat_age_s": None}, 0.0),
        ({"beat_age_s": 60.0, "store_ok_s": None}, 0.0),
    ],
)
def test_a_missed_heartbeat_triggers_listings_most_for_unlisted_machines(seen: dict[str, Any], share: float) -> None:
    assert poll_share(AttemptObservation(**seen), TIMEOUTS) == share


def test_no_attempt_is_hung_while_one_machine_is_not_listed() -> None:
    """The missing machine may be gone, or the listing may have omitted it."""
    two = build.attempt(line=replace(build.line(), nodes=2))
    for shown, event in ((1, None), (2, AttemptEvent.HUNG)):
        attempt_observation = AttemptObservation(listed=(machine(),) * shown, beat=BEAT, beat_age_s=400.0)
        assert judge(two, attempt_observation, build.at(10), TIMEOUTS, 600) is event


@pytest.mark.parametrize(
    ("seen", "state", "expected"),
    [
        ({"beat_age_s": 1.0, "peers_silent_s": 1.0}, AttemptState.BOOTING, AttemptEvent.FIRST_BEAT),
        ({"beat_age_s": 1.0, "peers_silent_s": math.inf}, AttemptState.BOOTING, None),
        ({"beat_age_s": 1.0, "peers_silent_s": 299.0}, AttemptState.TRAINING, None),
        ({"beat_age_s": 1.0, "peers_silent_s": 300.0}, AttemptState.TRAINING, AttemptEvent.HUNG),
        ({"beat_age_s": 1.0, "peers_silent_s": math.inf}, AttemptState.TRAINING, None),
        ({"beat_age_s": 1.0, "peers_silent_s": 300.0, "store_ok_s": None}, AttemptState.TRAINING, None),
    ],
)
def test_every_machine_of_an_attempt_must_send_heartbeats(
    seen: dict[str, Any], state: AttemptState, expected: AttemptEvent | None
) -> None:
    two = build.attempt(state, line=replace(build.line(), nodes=2), create_sent_at=build.at(0))
    shown = (machine(), machine(handle=Handle(provider="simulated", id="i-2", name=two.name)))
    assert judge(two, AttemptObservation(listed=shown, beat=BEAT, **seen), build.at(10), TIMEOUTS, 600) is expected
    if expected is None and state is AttemptState.BOOTING:
        assert judge(two, AttemptObservation(listed=shown, beat=BEAT, **seen), build.at(601), TIMEOUTS, 600) is (
            AttemptEvent.DEADLINE
        )


@pytest.mark.parametrize(
    ("second", "seen", "expected"),
    [
        (InstanceState.STARTING, {"peers_silent_s": 599.0}, None),
        (InstanceState.STARTING, {"peers_silent_s": 600.0}, AttemptEvent.HUNG),
        (InstanceState.STOPPED, {"peers_silent_s": 9.9}, None),
        (InstanceState.STOPPED, {"peers_silent_s": 10.0}, AttemptEvent.GONE),
        (InstanceState.STOPPED, {"peers_silent_s": 10.0, "store_ok_s": None}, None),
        (InstanceState.STOPPED, {"finished": 1}, None),
        (InstanceState.GONE, {"finished": 1}, None),
        (InstanceState.GONE, {"finished": 1, "lost": frozenset({"i-2"})}, None),
        (InstanceState.GONE, {"finished": 1, "beat_age_s": 20.0}, AttemptEvent.GONE),
        (InstanceState.GONE, {"finished": 1, "lost": frozenset({"i-1"})}, AttemptEvent.GONE),
        (InstanceState.GONE, {"peers_silent_s": 1.0}, AttemptEvent.GONE),
    ],
)
def test_most_silent_machine_decides_and_a_finished_one_is_not_missed(
    second: InstanceState, seen: dict[str, Any], expected: AttemptEvent | None
) -> None:
    two = build.attempt(line=replace(build.line(), nodes=2))
    shown = (machine(), machine(second, handle=Handle(provider="simulated", id="i-2", name=two.name)))
    attempt_observation = AttemptObservation(**{"listed": shown, "beat": BEAT, "beat_age_s": 1.0} | seen)
    assert judge(two, attempt_observation, build.at(10), TIMEOUTS, 600) is expected


def test_hung_first_machine_is_found_after_its_peer_finished() -> None:
    two = build.attempt(line=replace(build.line(), nodes=2))
    attempt_observation = AttemptObservation(
        listed=(machine(),), lost=frozenset({"i-2"}), finished=1, beat=BEAT, beat_age_s=1.0
    )
    assert judge(two, attempt_observation, build.at(10), TIMEOUTS, 600) is None
    stuck = replace(
        attempt_observation, beat=BEAT.model_copy(update={"phase": "saving"}), progress_age_s=TIMEOUTS.stuck_s
    )
    assert judge(two, stuck, build.at(10), TIMEOUTS, 600) is AttemptEvent.HUNG


@pytest.mark.parametrize(("beat_s", "ages"), [(5.0, (9.9, 10.0)), (10.0, (19.9, 20.0)), (60.0, (119.0, 120.0))])
def test_stopped_machine_is_believed_after_two_missed_heartbeats(beat_s: float, ages: tuple[float, float]) -> None:
    """This holds for any heartbeat interval, because a single listing between two heartbeats may be wrong."""
    asked = replace(TIMEOUTS, beat_s=beat_s)
    found = [
        liveness(1, AttemptObservation(listed=(machine(InstanceState.STOPPED),), beat=BEAT, beat_age_s=age), asked)
        for age in ages
    ]
    assert found[0] is not Liveness.DEAD
    assert found[1] is Liveness.DEAD


def test_running_machine_before_its_first_heartbeat_is_alive() -> None:
    """A machine that is not listed is unknown."""
    assert liveness(1, AttemptObservation(listed=(machine(),)), TIMEOUTS) is Liveness.ALIVE
    assert liveness(1, AttemptObservation(), TIMEOUTS) is Liveness.UNKNOWN
    assert liveness(2, AttemptObservation(listed=(machine(),)), TIMEOUTS) is Liveness.UNKNOWN


@pytest.mark.parametrize(
    ("seen", "state", "expected"),
    [
        ({"final": Final(attempt="x", outcome=Outcome.COMPLETED)}, AttemptState.TRAINING, AttemptEvent.FINAL),
        ({"listed": (machine(InstanceState.GONE),)}, AttemptState.TRAINING, AttemptEvent.GONE),
        ({"listed": (machine(), machine(InstanceState.GONE))}, AttemptState.TRAINING, AttemptEvent.GONE),
        ({"listed": (machine(InstanceState.STOPPED),)}, AttemptState.BOOTING, AttemptEvent.GONE),
        ({"listed": (machine(InstanceState.STOPPED),), "beat_age_s": 10.0}, AttemptState.TRAINING, AttemptEvent.GONE),
        ({"listed": (machine(InstanceState.STOPPED),), "beat_age_s": 9.0}, AttemptState.TRAINING, None),
        ({"listed": (machine(InstanceState.STOPPED),), "beat_age_s": 4000.0}, AttemptState.TRAINING, AttemptEvent.GONE),
        ({"listed": (machine(InstanceState.STARTING),), "beat_age_s": 599.0}, AttemptState.TRAINING, None),
        ({"listed": (machine(InstanceState.STARTING),), "beat_age_s": 600.0}, AttemptState.TRAINING, AttemptEvent.HUNG),
        ({"listed": (machine(InstanceState.UNKNOWN),), "beat_age_s": 600.0}, AttemptState.TRAINING, AttemptEvent.HUNG),
        ({"listed": (machine(),), "lost": frozenset("1"), "beat_age_s": 1.0}, AttemptState.TRAINING, AttemptEvent.GONE),
        ({"absent": True, "beat": BEAT, "beat_age_s": 60.0}, AttemptState.TRAINING, AttemptEvent.GONE),
        ({"absent": True, "beat": BEAT, "beat_age_s": 5.0}, AttemptState.TRAINING, None),
        ({"listed": (machine(),), "beat": BEAT, "beat_age_s": 1.0}, AttemptState.BOOTING, AttemptEvent.FIRST_BEAT),
        ({"listed": (machine(accelerator="a6000"),)}, AttemptState.BOOTING, AttemptEvent.MISMATCH),
        ({"listed": (machine(), machine(fault="no image"))}, AttemptState.BOOTING, AttemptEvent.SETUP_FAILED),
        ({"listed": (machine(fault="no image"),), "beat": BEAT}, AttemptState.BOOTING, AttemptEvent.FIRST_BEAT),
        ({"listed": (machine(fault="no image"),)}, AttemptState.TRAINING, None),
        ({"listed": (machine(notice_s=30.0),)}, AttemptState.BOOTING, AttemptEvent.NOTICE),
        ({"listed": (machine(notice_s=30.0),)}, AttemptState.TRAINING, AttemptEvent.NOTICE),
        ({"listed": (machine(notice_s=900.0),)}, AttemptState.TRAINING, None),
        ({"beat": NOTICED, "beat_age_s": 1.0}, AttemptState.TRAINING, AttemptEvent.NOTICE),
        ({"listed": (machine(),), "beat": BEAT, "beat_age_s": 400.0}, AttemptState.TRAINING, AttemptEvent.HUNG),
        ({"listed": (machine(),), "beat": BEAT, "progress_age_s": 4000.0}, AttemptState.TRAINING, AttemptEvent.HUNG),
        ({"listed": (machine(),), "beat": BEAT, "beat_age_s": 1.0, "progress_age_s": 4.0}, AttemptState.TRAINING, None),
        ({"listed": (), "beat": BEAT, "beat_age_s": 400.0}, AttemptState.TRAINING, None),
        ({"listed": (machine(),)}, AttemptState.BOOTING, None),
        ({"absent": True, "beat": BEAT, "beat_age_s": 20.0}, AttemptState.TRAINING, AttemptEvent.GONE),
        ({"listed": (machine(notice_s=150.0),)}, AttemptState.TRAINING, AttemptEvent.NOTICE),
        ({"listed": (machine(notice_s=900.0), machine(notice_s=30.0))}, AttemptState.DRAINING, AttemptEvent.NOTICE),
        ({"listed": (machine(),), "beat": BEAT, "beat_age_s": 299.0}, AttemptState.TRAINING, None),
        ({"listed": (machine(),), "beat": BEAT, "beat_age_s": 300.0}, AttemptState.TRAINING, AttemptEvent.HUNG),
        ({"listed": (machine(),), "beat": BEAT, "beat_age_s": 300.0}, AttemptState.DRAINING, None),
        ({"listed": (machine(),), "beat": BEAT, "progress_age_s": 1800.0}, AttemptState.TRAINING, AttemptEvent.HUNG),
        ({"listed": (machine(),), "beat": BEAT, "beat_age_s": 400.0, "store_ok_s": None}, AttemptState.TRAINING, None),
        ({"listed": (machine(),), "beat": BEAT, "beat_age_s": 400.0, "store_ok_s": 19.0}, AttemptState.TRAINING, None),
        ({"listed": (machine(InstanceState.UNKNOWN),), "beat": BEAT, "beat_age_s": 1.0, "progress_age_s": 1e6},
         AttemptState.TRAINING, None),
        ({"listed": (machine(), machine(InstanceState.STARTING)), "beat": BEAT, "beat_age_s": 400.0},
         AttemptState.TRAINING, None),
    ],
)  # fmt: skip
def test_each_observation_has_one_verdict(
    seen: dict[str, Any], state: AttemptState, expected: AttemptEvent | None
) -> None:
    assert verdict(state, **seen) is expected


@pytest.mark.parametrize(
    ("phase", "step", "limit_s"),
    [
        ("training", 3, 1800),
        ("training", 0, 7200),
        ("evaluating", 3, 7200),
        ("saving", 3, 7200),
        ("loading", 0, None),
        ("setup", 0, None),
    ],
)
def test_a_machine_without_progress_is_hung_after_its_phases_limit(
    phase: Any, step: int, limit_s: float | None
) -> None:
    """An agent may take an hour to deliver results. A set-up without news is judged by the bytes that it received."""
    beat = BEAT.model_copy(update={"phase": phase, "step": step})

    def after(age_s: float) -> AttemptEvent | None:
        return verdict(listed=(machine(),), beat=beat, beat_age_s=1.0, progress_age_s=age_s)

    assert after((limit_s or 1e6) - 1) is None
    assert after(limit_s or 1e6) is (AttemptEvent.HUNG if limit_s else None)


def test_progress_is_a_step_in_training_and_any_activity_elsewhere() -> None:
    """A step is progress in training. Messages, saves and sent bytes are progress in other phases."""

    def differs(phase: Any, **changes: Any) -> bool:
        beat = BEAT.model_copy(update={"phase": phase})
        return progress_of(beat) != progress_of(beat.model_copy(update=changes))

    saved = {"checkpoint": CheckpointRef(manifest="m", step=3)}
    others: list[dict[str, Any]] = [{"message": "row 5"}, saved, {"sent_bytes": 1 << 20}]
    assert differs("training", step=4)
    assert not any(differs("training", **one) for one in others)
    assert all(differs("saving", **one) for one in others)
    assert not differs("saving", seq=9, sent_bytes=1000)


def test_the_fault_of_any_machine_is_reported() -> None:
    assert fault_message((machine(), machine(fault="no image"))) == "no image"
    assert fault_message((machine(),)) is None


def test_booting_has_a_deadline() -> None:
    assert verdict(AttemptState.BOOTING, at=600, listed=(machine(),)) is None
    assert verdict(AttemptState.BOOTING, at=601, listed=(machine(),)) is AttemptEvent.DEADLINE


@pytest.mark.parametrize(("store_ok_s", "event"), [(None, None), (19.9, None), (20.0, AttemptEvent.DEADLINE)])
def test_the_boot_deadline_waits_while_heartbeats_are_unreadable(
    store_ok_s: float | None, event: AttemptEvent | None
) -> None:
    """An agent that could not write while the blob store was away writes as soon as it is back."""
    assert verdict(AttemptState.BOOTING, at=9000, listed=(machine(),), store_ok_s=store_ok_s) is event


def test_stopped_listing_is_believed_only_while_heartbeats_are_readable() -> None:
    """Heartbeats are unreadable, so every working machine seems silent. A wrong listing must not end one."""
    seen = (machine(InstanceState.STOPPED),)
    assert verdict(AttemptState.TRAINING, listed=seen, beat_age_s=4000.0, store_ok_s=None) is None
    assert verdict(AttemptState.TRAINING, listed=seen, beat_age_s=4000.0, store_ok_s=0.0) is AttemptEvent.GONE


def test_a_wrong_machine_is_reported_by_its_cloud_alone() -> None:
    seen = (machine(accelerator="a6000"),)
    assert verdict(AttemptState.BOOTING, listed=seen, store_ok_s=None) is AttemptEvent.MISMATCH


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"accelerator": "t4"}, "t4"),
        ({"gpus": 2}, "1 GPUs, got 2"),
        ({"spot": False}, "asked for spot, got the other"),
        ({"gpu_memory_bytes": 43 * GIB}, "asked for 48 GiB a GPU, got 43"),
        ({"usd_per_hour": Decimal("0.365")}, "asked for $0.3600/h, billed $0.3650/h"),
    ],
)
def test_a_wrong_machine_is_named(changes: dict[str, Any], word: str) -> None:
    found = mismatch_message(build.offer(), (machine(**changes),))
    assert found is not None
    assert word in found


def test_a_bid_that_was_not_asked_for_is_named() -> None:
    assert mismatch_message(build.offer(spot=False), (machine(spot=True),)) == "asked for on-demand, got the other kind"


def test_a_machine_within_the_tolerance_matches_the_offer() -> None:
    assert mismatch_message(build.offer(gpu_memory_bytes=40 * GIB), (machine(gpu_memory_bytes=36 * GIB),)) is None
    assert mismatch_message(build.offer(), (machine(usd_per_hour=Decimal("0.3646")),)) is None


def test_facts_missing_from_a_listing_are_no_mismatch() -> None:
    assert mismatch_message(build.offer(), (machine(),)) is None
    assert mismatch_message(build.offer(), (machine(accelerator="l40s", gpus=1, spot=True),)) is None
    assert mismatch_message(build.offer(), (machine(gpu_memory_bytes=44 * GIB, usd_per_hour=Decimal("0.364")),)) is None


def test_the_most_silent_machine_sets_the_poll_share() -> None:
    """Heartbeats of the first machine do not hide that another machine is silent."""
    fresh = AttemptObservation(beat=BEAT, beat_age_s=1.0, store_ok_s=0.0)
    assert poll_share(fresh, TIMEOUTS) == 0.0
    assert poll_share(replace(fresh, peers_silent_s=TIMEOUTS.late_s), TIMEOUTS) > 0.0

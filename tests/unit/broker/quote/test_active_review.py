"""A running attempt moves to spot only where that is cheaper, in time, affordable and without loss of work."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.domain.instance import Caps
from broker.domain.job import Attempt, AttemptState, Forecast, Job, Reason, Signal
from broker.domain.offer import Offer
from broker.domain.policy import Policy
from broker.estimator.planning.corrections import NO_CORRECTIONS
from broker.policy.budgets import Applied, PolicyUsage
from broker.quote.engine import quote
from broker.quote.placement_facts import PlacementSettings
from broker.quote.spot.review import (
    MAX_DOUBLINGS,
    MIN_SPOT_STAY_S,
    MIN_STAY_S,
    ActiveReview,
    Move,
    Stay,
    may_move,
    required_stay_s,
    review_active,
)
from broker.quote.spot.shortlist import OFFERS_OF_A_KIND, shortlist
from tests.support import build
from tests.support.machines import NOW, SCRIPT, WORK, offer, spec
from trainer.contract.documents import CheckpointRef, Heartbeat

CAPS = {"cloud": Caps(spot=True, teardown_s=30, list_lag_s=10, boot_s=60)}
ON_DEMAND = offer(id="cloud/on-demand")
SPOT = offer(id="cloud/spot", spot=True, usd_per_hour=Decimal("0.80"), on_demand_usd_per_hour=Decimal("2.50"))
LONG = replace(WORK, steps=8000)
DRAIN = build.drain_budget()
SETTINGS = PlacementSettings(installation=build.INSTALLATION, caps=CAPS, drain_budget=DRAIN)
LINE = quote(
    spec(), LONG, (ON_DEMAND,), now=NOW, local_files=False, scoped_store=True, spent=Decimal(0),
    cap_left=Decimal(1000), excluded={}, caps=CAPS,
).lines[0]  # fmt: skip


def beat(step: int, saved: int | None) -> Heartbeat:
    checkpoint = None if saved is None else CheckpointRef(manifest="m", step=saved, save_s=10, stall_s=1, bytes=1)
    return Heartbeat(attempt="a" * 13, boot="b", seq=1, step=step, total_steps=LONG.steps, checkpoint=checkpoint)


def facts(
    offers: tuple[Offer, ...] = (ON_DEMAND, SPOT),
    *,
    deadline_h: float | None = 200.0,
    trained_s: float = MIN_STAY_S,
    job: dict[str, Any] | None = None,
    attempt: dict[str, Any] | None = None,
    resources: dict[str, Any] | None = None,
    **changes: Any,
) -> ActiveReview:
    limit = {} if deadline_h is None else {"deadline": (NOW + timedelta(hours=deadline_h)).isoformat()}
    wanted = spec(cap_usd="1000", resources=resources or {}, **limit)
    running = build.active_job(cap_usd=Decimal(1000))
    running = replace(running, spec=wanted, workload=LONG, **(job or {}))
    began = NOW - timedelta(seconds=trained_s)
    ran = build.attempt(
        **{"line": LINE, "first_beat_at": began, "create_sent_at": began, "beat": beat(1000, 990)} | (attempt or {})
    )
    return ActiveReview(
        **{
            "job": running, "attempt": ran, "now": NOW, "settings": SETTINGS, "offers": offers,
            "learned": NO_CORRECTIONS, "policies_at": NOW,
        } | changes
    )  # fmt: skip


def test_an_attempt_moves_to_spot_that_is_cheaper() -> None:
    for decision in (review_active(facts()), review_active(facts(deadline_h=None))):
        assert isinstance(decision, Move)
        assert decision.offer.id == SPOT.id
        assert decision.saved_usd > 5
        assert decision.message.startswith("moves to spot in eu (Cloud 1xH100, $0.8000/h), saves $")


def test_a_move_must_pay_for_the_delay_without_a_deadline() -> None:
    """The delay of a move is its drain, set-up and expected preemptions, at `hour_worth_usd` an hour."""
    cheap, dear = facts(deadline_h=None), facts(deadline_h=None)
    dear = replace(dear, job=replace(dear.job, spec=dear.job.spec.model_copy(update={"hour_worth_usd": Decimal(900)})))
    moves, stays = review_active(cheap), review_active(dear)
    assert isinstance(moves, Move)
    assert isinstance(stays, Stay)
    assert "is expected to cost" in stays.reason
    with_deadline = facts()
    spec = with_deadline.job.spec.model_copy(update={"hour_worth_usd": Decimal(900)})
    assert isinstance(review_active(replace(with_deadline, job=replace(with_deadline.job, spec=spec))), Move)


@pytest.mark.parametrize("deadline_h", [200.0, None])
def test_a_machine_that_is_cheaper_than_the_market_is_kept(deadline_h: float | None) -> None:
    """The market may sell on-demand at more than the running machine costs, e.g. once its offer is rented."""
    own = replace(LINE, offer=replace(LINE.offer, usd_per_hour=Decimal("0.50")))
    decision = review_active(facts(deadline_h=deadline_h, attempt={"line": own}))
    assert isinstance(decision, Stay)
    assert "is expected to cost" in decision.reason


def applied(**limits: Any) -> tuple[Applied, ...]:
    return (Applied(id=1, policy=Policy(name="p", **limits), usage=PolicyUsage(jobs=1, gpus=1)),)


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (facts(forbidden="not here"), "not here"),
        (facts((ON_DEMAND,)), "no spot offer is on sale"),
        (facts((ON_DEMAND, replace(SPOT, usd_per_hour=Decimal("2.25")))), "is expected to cost"),
        (facts((ON_DEMAND, replace(SPOT, usd_per_hour=Decimal("2.25"))), deadline_h=None), "is expected to cost"),
        (facts((ON_DEMAND, replace(SPOT, usd_per_hour=Decimal("2.60"), on_demand_usd_per_hour=None))), "costs less"),
        (facts(trained_s=MIN_STAY_S - 1), "after 20 min"),
        (facts(attempt={"idle": "gpu"}), "could lose work"),
        (facts(deadline_h=1.0), "no spot offer fits"),
        (facts(job={"cap_usd": Decimal(1)}), "no spot offer fits"),
        (facts(policies=applied(max_jobs=1)), "could lose its place"),
        (facts(resources={"spot": "never"}), "spot is not allowed"),
        (facts(attempt={"signal": Signal.CAP}), "does not train"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_attempt_stays_with_a_reason(kept: ActiveReview, reason: str) -> None:
    decision = review_active(kept)
    assert isinstance(decision, Stay)
    assert reason in decision.reason


def test_an_attempt_without_a_saved_checkpoint_stays() -> None:
    """A move while no save has succeeded would lose the work since the start."""
    for report in (beat(1000, None), beat(1000, 900), None):
        before = facts()
        resumed = ("jobs/j/a/step-00000900/manifest.json",) if report and report.checkpoint else ()
        ran = replace(before.attempt, beat=report)
        if resumed:
            key = f"checkpoints/j/{'a' * 13}/000000000900/manifest.json"
            ran = replace(ran, resume_from=(key,))
        decision = review_active(replace(before, attempt=ran))
        assert isinstance(decision, Stay), report
        assert "checkpoint" in decision.reason


def test_a_script_without_checkpoints_stays_on_demand() -> None:
    script = build.spec(script={"code": "upload:00", "command": ["true"], "checkpoints": False})
    before = facts()
    silent = review_active(replace(before, job=replace(before.job, spec=script, workload=SCRIPT)))
    assert silent == Stay(
        reason="stays on demand: the script writes no checkpoints, so a move would lose its work"
    )  # fmt: skip
    saving = build.spec(cap_usd="1000")
    unknown = review_active(replace(before, job=replace(before.job, spec=saving, workload=SCRIPT)))
    assert unknown == Stay(reason="stays on demand: its duration is unknown")


def latest_h(**changes: Any) -> float:
    """Return the shortest deadline, in hours, with which the attempt still moves."""
    low, high = 0.0, 200.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (
            (low, middle) if isinstance(review_active(facts(deadline_h=middle, **changes)), Move) else (middle, high)
        )
    return high


def test_a_move_leaves_time_for_on_demand_after_it() -> None:
    """The whole rest must still fit on demand after the longest drain, with two changeovers and its P90."""
    rest = quote(
        spec(), replace(LONG, steps=LONG.steps - 990), (ON_DEMAND,), now=NOW, local_files=False, scoped_store=True,
        spent=Decimal(0), cap_left=Decimal(1000), excluded={}, caps=CAPS,
    ).lines[0]  # fmt: skip
    assert rest.hours_p90 is not None
    drains_h = 2 * DRAIN.lead_s / 3600
    assert latest_h() > rest.hours_p90 + drains_h


def test_an_attempt_that_is_slower_than_estimated_needs_more_time() -> None:
    assert LINE.step_s is not None
    slow = Forecast(usd=Decimal(1), finish_at=NOW, step_s=2 * LINE.step_s, made_at=NOW)
    fast = replace(slow, step_s=LINE.step_s / 2)
    assert latest_h(job={"forecast": slow}) == pytest.approx(2 * latest_h(), rel=1e-3)
    assert latest_h(job={"forecast": fast}) == pytest.approx(latest_h(), rel=1e-3)


def test_a_move_into_a_missed_deadline_is_not_made() -> None:
    """The offer on demand meets the deadline by its P50 only, so that the job has no time to lose."""
    rest = quote(
        spec(), replace(LONG, steps=LONG.steps - 990), (ON_DEMAND,), now=NOW, local_files=False, scoped_store=True,
        spent=Decimal(0), cap_left=Decimal(1000), excluded={}, caps=CAPS,
    ).lines[0]  # fmt: skip
    assert rest.hours_p50 is not None
    decision = review_active(facts(deadline_h=rest.hours_p50 * 1.2))
    assert decision == Stay(reason="stays on demand: the deadline leaves no time for a move")


def ended(spot: bool, reason: Reason, trained_s: float | None) -> Attempt:
    """Return an ended attempt that trained for some seconds; None: it had no machine."""
    market = SPOT if spot else ON_DEMAND
    first = None if trained_s is None else NOW
    return build.attempt(
        AttemptState.ENDED, line=replace(LINE, offer=market), reason=reason, first_beat_at=first,
        terminating_since=NOW + timedelta(seconds=trained_s or 0), ended_at=NOW,
    )  # fmt: skip


def test_fruitless_moves_double_the_stay() -> None:
    """A market that lists spot and refuses it moves a job a few times a day at most, not every twenty minutes."""
    moved, refused = ended(False, Reason.MOVED, 3600), ended(True, Reason.NO_CAPACITY, None)
    fell_back = ended(False, Reason.PREEMPTED, 3600)
    assert required_stay_s(()) == MIN_STAY_S
    assert required_stay_s((fell_back,)) == MIN_STAY_S
    assert required_stay_s((moved, refused)) == 2 * MIN_STAY_S
    assert required_stay_s((moved, refused, moved, ended(True, Reason.PREEMPTED, 60))) == 4 * MIN_STAY_S
    assert required_stay_s((moved, refused) * 20) == MIN_STAY_S * 2**MAX_DOUBLINGS
    assert required_stay_s((moved, refused, moved, ended(True, Reason.PREEMPTED, MIN_STAY_S))) == MIN_STAY_S
    last = facts(trained_s=1.5 * MIN_STAY_S)
    assert isinstance(review_active(last), Move)
    assert isinstance(review_active(replace(last, earlier=(moved, refused))), Stay)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from((None, 0.0, 60.0, MIN_STAY_S - 1)), min_size=1, max_size=6))
def test_no_market_moves_a_job_to_and_fro(stays_s: list[float | None]) -> None:
    """Each move finds spot that is refused (None) or lost after some seconds, for four days: moves are bounded."""
    earlier: tuple[Attempt, ...] = ()
    time_s, moves, day = 0.0, 0, 86_400.0
    while time_s < 4 * day:
        stay_s = required_stay_s(earlier)
        for trained_s, expected in ((stay_s - 1, Stay), (stay_s, Move)):
            case = replace(facts(deadline_h=None, trained_s=trained_s), earlier=earlier)
            assert isinstance(review_active(case), expected)
        lost = stays_s[moves % len(stays_s)]
        reason = Reason.NO_CAPACITY if lost is None else Reason.PREEMPTED
        earlier = (*earlier, ended(False, Reason.MOVED, stay_s), ended(True, reason, lost))
        time_s, moves = time_s + stay_s + (lost or 0.0), moves + 1
        assert moves <= MAX_DOUBLINGS + 1 + time_s / (MIN_STAY_S * 2**MAX_DOUBLINGS)


@pytest.mark.parametrize(
    "changes",
    [
        {"state": AttemptState.DRAINING}, {"signal": Signal.MOVE},
        {"line": replace(LINE, offer=replace(ON_DEMAND, usd_per_hour=Decimal(0)))},
    ],
    ids=["draining", "signal", "free"],
)  # fmt: skip
def test_only_attempts_that_train_and_cost_are_reviewed(changes: dict[str, Any]) -> None:
    ran = replace(facts().attempt, **changes)
    assert not may_move(facts().job, ran)
    assert not may_move(replace(facts().job, stop_requested=True), facts().attempt)


DEAR = replace(SPOT, id="cloud/dear", region="us", usd_per_hour=Decimal("1.60"))
HOUR_S = MIN_SPOT_STAY_S


def on_spot(*offers: Offer, trained_s: float = HOUR_S, **changes: Any) -> ActiveReview:
    """Return the review of an attempt on the dear spot offer."""
    line = replace(LINE, offer=DEAR)
    return facts((ON_DEMAND, DEAR, *offers), trained_s=trained_s, attempt={"line": line}, **changes)


@pytest.mark.parametrize("deadline_h", [200.0, None])
def test_an_attempt_on_spot_moves_to_clearly_cheaper_spot(deadline_h: float | None) -> None:
    decision = review_active(on_spot(SPOT, deadline_h=deadline_h))
    assert isinstance(decision, Move)
    assert decision.offer.id == SPOT.id
    assert 0 < decision.saved_usd < Decimal("0.80") * 40, "the price counts for the expected life of a machine only"


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (on_spot(), "no cheaper spot offer"),
        (on_spot(replace(SPOT, usd_per_hour=Decimal("1.60"))), "no cheaper spot offer"),
        (on_spot(replace(SPOT, usd_per_hour=Decimal("1.58"))), "saves too little"),
        (on_spot(replace(SPOT, accelerator="l40s")), "no cheaper spot offer"),
        (on_spot(SPOT, trained_s=HOUR_S - 1), "after 60 min"),
        (on_spot(SPOT, deadline_h=1.0), "no other spot offer"),
        (on_spot(SPOT, policies=applied(max_jobs=1)), "could lose its place"),
        (on_spot(SPOT, job={"cap_usd": Decimal(1)}), "no other spot offer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_attempt_on_spot_stays_with_a_reason(kept: ActiveReview, reason: str) -> None:
    decision = review_active(kept)
    assert isinstance(decision, Stay)
    assert reason in decision.reason


def test_an_attempt_on_spot_of_unknown_duration_stays() -> None:
    saves = on_spot(SPOT, deadline_h=None)
    unknown = replace(saves, job=replace(saves.job, spec=build.spec(cap_usd="1000"), workload=SCRIPT))
    assert review_active(unknown) == Stay(reason="stays on spot: its duration is unknown")


def test_fruitless_moves_between_spot_offers_double_the_stay() -> None:
    """A price that swings every hour moves a job less and less often."""
    moved, lost = ended(True, Reason.MOVED, HOUR_S / 2), ended(True, Reason.PREEMPTED, HOUR_S / 2)
    assert required_stay_s((), 0.0) == HOUR_S
    assert [required_stay_s((moved,) * n, HOUR_S / 2) for n in range(4)] == [HOUR_S * 2**n for n in range(4)]
    assert required_stay_s((moved, moved), HOUR_S) == HOUR_S, "a full hour after the last move is not a fruitless one"
    assert required_stay_s((moved, lost), HOUR_S / 2) == HOUR_S
    assert required_stay_s((ended(False, Reason.MOVED, MIN_STAY_S), moved)) == 2 * MIN_STAY_S


def test_a_short_list_has_the_cheapest_offers_on_sale_of_each_kind() -> None:
    resources = spec().resources
    many = tuple(
        replace(SPOT, id=f"cloud/spot{n}", region="us" if n % 2 else "eu", usd_per_hour=Decimal(n + 1) / 10)
        for n in range(20)
    )
    gone = replace(SPOT, id="cloud/gone", usd_per_hour=Decimal("0.01"), available=False)
    market = (ON_DEMAND, gone, *many)
    listed = shortlist(market, NO_CORRECTIONS.spots, resources, {})
    assert {made.id for made in listed} == {ON_DEMAND.id, *(f"cloud/spot{n}" for n in range(OFFERS_OF_A_KIND))}
    blocked = shortlist(market, NO_CORRECTIONS.spots, resources, {"cloud/spot0": "sold out"})
    assert "cloud/spot0" not in {made.id for made in blocked}
    there = shortlist(market, NO_CORRECTIONS.spots, resources.model_copy(update={"regions": ("us",)}), {})
    assert {made.region for made in there} == {"us"}
    assert shortlist(market, NO_CORRECTIONS.spots, resources.model_copy(update={"providers": ("other",)}), {}) == ()


def test_the_job_of_the_review_is_not_changed() -> None:
    before = facts()
    review_active(before)
    assert isinstance(before.job, Job)
    assert before == facts()

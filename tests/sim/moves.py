"""Moves of running attempts in a share of the installations, and what holds of each move.

Simulated jobs are scripts, whose duration is unknown, so the product would move none. In these installations this
module replaces the product's decision: it moves an attempt that has saved to any spot offer on sale. Everything that
follows from a move is the product's own.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from broker.controllers.monitoring.attempt_review import AttemptReview
from broker.domain.job import AttemptState, Job, Reason
from broker.domain.money import ZERO
from broker.domain.offer import Offer
from broker.lifecycle.transitions import made_progress
from broker.ports import Change
from broker.quote.spot.review import ActiveReview, Move, Stay
from providers.simulated.market import uniform_draw

if TYPE_CHECKING:
    from broker.controllers.fleet import Fleet
    from tests.sim.world import World

INSTALLATIONS, ATTEMPTS = 0.3, 0.6
"""Share of installations with moves, and of the attempts on demand in them that move."""
STAY_S = 60.0
SOLD_OUT_BUCKETS = 5
"""Number of buckets of time for which spot is sold out; it is then on sale for the same number."""


class Moves:
    """The moves of one installation."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.happen = uniform_draw(world.seed, "moves") < INSTALLATIONS
        self.made = 0

    def begin(self, fleet: "Fleet") -> None:
        """Let the review of a broker that starts decide as this module does."""
        for controller in fleet.controllers:
            if isinstance(controller, AttemptReview) and self.happen:
                controller.decide = self._decide

    def listed(self, offers: Sequence[Offer], bucket: int) -> Sequence[Offer]:
        """Return the offers as the market lists them in a bucket of time: spot is sold out for every other while."""
        if not self.happen or bucket // SOLD_OUT_BUCKETS % 2:
            return offers
        return [replace(offer, available=False) if offer.spot else offer for offer in offers]

    def _decide(self, facts: ActiveReview) -> Move | Stay:
        attempt, spots = facts.attempt, [offer for offer in facts.offers if offer.spot]
        since = attempt.first_beat_at
        stayed = since is not None and (facts.now - since).total_seconds() >= STAY_S
        chosen = uniform_draw(self._world.seed, "move", attempt.id) < ATTEMPTS
        if attempt.line.offer.spot or not (spots and stayed and chosen and made_progress(attempt)):
            return Stay(reason="stays")
        return Move(offer=spots[0], saved_usd=ZERO, message=f"moves to spot in {spots[0].region}, saves $0")

    def written(self, change: Change, before: Job | None) -> None:
        """Check an end that was written. `before`: the job as it was."""
        self._check_retries(change, before)
        if change.attempt is None or change.attempt[1].reason is not Reason.MOVED:
            return
        was, ended = change.attempt
        if was.state is AttemptState.TRAINING and ended.state is not AttemptState.DRAINING:
            self._world.fail("move_drains", f"attempt {ended.id} moves without a drain: {ended.state}")
        if ended.state is not AttemptState.ENDED or change.job is None or before is None:
            return
        self.made += 1
        if change.job[1].retries_used != before.retries_used:
            self._world.fail("move_is_free", f"job {before.id}: a move used up a retry")

    def _check_retries(self, change: Change, before: Job | None) -> None:
        """Check that an end of an attempt uses up one retry at most, and that a preemption uses up none."""
        if change.attempt is None or change.job is None or before is None:
            return
        used, reason = change.job[1].retries_used - before.retries_used, change.attempt[1].reason
        if used not in (0, 1) or (used and reason is Reason.PREEMPTED):
            self._world.fail("retry_is_counted_once", f"job {before.id}: {reason} used up {used} retries")

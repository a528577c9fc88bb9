"""Corrections of the estimator from the observed runs of all teams: speed, memory and preemptions.

Steps: read spot machines, spot markets, finished jobs and observed runs, assess each new run once, compute corrections.
Facts: hours and preemptions of spot machines, what spot markets have shown, measurements of ended attempts. Running
attempts that re-quoted their job add their speed.
Decisions: the corrections that quotes use from now, by `broker.estimator.planning.corrections`.
"""

import asyncio
from dataclasses import replace
from datetime import timedelta

from broker.controllers.base.context import ControllerContext
from broker.controllers.market.offers_by_id import Offers
from broker.domain.ids import AttemptId
from broker.domain.spending import MAX_FINISHED, SpendWindow
from broker.domain.workload import RunObservation
from broker.estimator.planning.corrections import NO_CORRECTIONS, ComparedRun, Corrections, assess, learn, observed
from broker.estimator.preemption_rate import place_of
from broker.estimator.spot_hazards import Market, Timeline
from broker.estimator.spot_timelines import bounded, timelines
from broker.quote.forecast import measured_attempt
from broker.reporting.calibration import tier_records

EACH = 16
"""Number of latest runs that are read for each GPU, method and family."""
SPOTS_WITHIN_S = 30 * 86_400.0
"""Age limit of spot machines: older ones belong to another market."""
MARKETS_WITHIN = timedelta(days=14)
"""Age limit of what spot markets have shown; by then it weighs a seventh."""
RECORDS_WITHIN = timedelta(days=90)
"""Age limit of finished jobs that make the record of a tier."""
AT_ONCE = 10
"""Timelines that are computed before other tasks get their turn."""
SPOTS_EVERY = 20
"""Steps between two reads of spot machines and finished jobs. A read scans all attempts, and a changed result
invalidates all quotes.
"""


class ObservedRuns:
    """Reads the observations from time to time, so that quotes never wait for them."""

    name = "observed_runs"

    def __init__(self, context: ControllerContext, offers: Offers = tuple) -> None:
        self._context = context
        self._offers = offers
        self._assessed: dict[tuple[AttemptId, bool], ComparedRun | None] = {}
        """Assessed runs by attempt and whether the attempt still runs."""
        self._running: dict[AttemptId, RunObservation] = {}
        self._corrections = NO_CORRECTIONS
        self._steps = 0
        self.every_s = context.intervals.observed_runs_s

    def __call__(self) -> Corrections:
        return self._corrections

    async def step(self) -> bool:
        if self._steps % SPOTS_EVERY == 0:
            await self._read_spots()
            await self._read_records()
        self._steps += 1
        ended = {run.attempt_id: run for run in await self._context.store.observations(max_per_pair=EACH)}
        self._running = await self._read_running()
        runs = {(attempt, False): run for attempt, run in ended.items()}
        runs |= {(attempt, True): run for attempt, run in self._running.items()}
        if runs.keys() == self._assessed.keys():
            return False
        assessed: dict[tuple[AttemptId, bool], ComparedRun | None] = {}
        for key, run in runs.items():
            is_assessed = key in self._assessed
            assessed[key] = self._assessed[key] if is_assessed else assess(run)
            if not is_assessed:
                await asyncio.sleep(0)  # yield to other tasks: the first assessment of many runs takes a while
        experience = learn([run for run in assessed.values() if run is not None])
        for hardware in experience.speeds:
            experience.prepare(hardware)
            await asyncio.sleep(0)
        before = self._corrections
        experience = replace(experience, spots=before.spots, markets=before.markets, records=before.records)
        self._assessed, self._corrections = assessed, experience
        return False

    async def _read_running(self) -> dict[AttemptId, RunObservation]:
        """Return the speed of each running attempt that re-quoted its job.

        A speed is read once, so that a running attempt does not invalidate all quotes with each heartbeat. The memory
        counts at the end alone, because later rows may be longer.
        """
        running = dict[AttemptId, RunObservation]()
        for row in await self._context.store.sent_attempts():
            attempt = row.attempt
            if measured_attempt(row.job.forecast) != attempt.number:
                continue
            run = self._running.get(attempt.id) or observed(row.job, attempt)
            if run is not None and run.tokens_per_s is not None:
                running[attempt.id] = replace(run, peak_bytes=None)
        return running

    async def _read_spots(self) -> None:
        """Read own spot machines and the history of spot markets. Both stay the same objects if nothing is new."""
        store, now = self._context.store, self._context.clock.now()
        spots = {place_of(run): run for run in await store.spot_hours(within_s=SPOTS_WITHIN_S)}
        accelerators = {offer.accelerator for offer in self._offers() if offer.spot}
        evidence = await store.spot_evidence(accelerators, since=now - MARKETS_WITHIN)
        lines = dict[Market, Timeline]()
        for number, (market, line) in enumerate(timelines(evidence, now.timestamp() / 60)):
            lines[market] = line
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        markets = bounded(lines)
        corrections = self._corrections
        if spots != corrections.spots or markets != corrections.markets:
            self._corrections = replace(corrections, spots=spots, markets=markets)

    async def _read_records(self) -> None:
        """Read how the forecasts of all teams' finished jobs held, by tier of evidence."""
        now = self._context.clock.now()
        window = SpendWindow(since=now - RECORDS_WITHIN, until=now)
        finished = await self._context.store.finished(window, limit=MAX_FINISHED)
        records = tier_records(finished)
        if records != self._corrections.records:
            self._corrections = replace(self._corrections, records=records)

"""What all teams' runs have shown of speed, memory and preemptions, for the quotes of this process."""

import asyncio
from dataclasses import replace

from broker.controllers.base.context import ControllerContext
from broker.domain.ids import AttemptId
from broker.estimator.planning.corrections import NO_CORRECTIONS, ComparedRun, Corrections, assess, learn
from broker.estimator.preemption_rate import place_of

EACH = 16
"""Latest runs of a GPU, method and family that are looked at."""
SPOTS_WITHIN_S = 30 * 86_400.0
"""Older spot machines tell of another market."""
SPOTS_EVERY = 20
"""Steps: it reads all attempts of that time, and a new answer makes every quote that is remembered a new one."""


class ObservedRuns:
    """Reads the observations now and then; quotes never wait for it."""

    name = "lessons"

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._assessed: dict[AttemptId, ComparedRun | None] = {}
        self._experience = NO_CORRECTIONS
        self._steps = 0
        self.every_s = context.rhythm.lessons_s

    def __call__(self) -> Corrections:
        return self._experience

    async def step(self) -> bool:
        if self._steps % SPOTS_EVERY == 0:
            seen = await self._context.store.spot_hours(within_s=SPOTS_WITHIN_S)
            spots = {place_of(one): one for one in seen}
            if spots != self._experience.spots:
                self._experience = replace(self._experience, spots=spots)
        self._steps += 1
        observed = await self._context.store.observations(each=EACH)
        if {one.attempt_id for one in observed} == self._assessed.keys():
            return False
        assessed: dict[AttemptId, ComparedRun | None] = {}
        for one in observed:
            known = one.attempt_id in self._assessed
            assessed[one.attempt_id] = self._assessed[one.attempt_id] if known else assess(one)
            if not known:
                await asyncio.sleep(0)  # others' turn: a first look at many takes a while
        experience = learn([one for one in assessed.values() if one is not None])
        for hardware in experience.speeds:
            experience.prepare(hardware)
            await asyncio.sleep(0)
        self._assessed, self._experience = assessed, replace(experience, spots=self._experience.spots)
        return False

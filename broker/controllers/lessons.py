"""What all teams' runs have shown of speed and memory, for the quotes of this process."""

import asyncio

from broker.controllers.context import Context
from broker.decide.experience import NOTHING, Assessed, Experience, assess, learn
from broker.domain.ids import AttemptId

EACH = 16
"""Latest runs of a GPU, method and family that are looked at."""


class Lessons:
    """Reads the observations now and then; quotes never wait for it."""

    name = "lessons"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._assessed: dict[AttemptId, Assessed | None] = {}
        self._experience = NOTHING
        self.every_s = context.rhythm.lessons_s

    def __call__(self) -> Experience:
        return self._experience

    async def step(self) -> bool:
        observed = await self._context.store.observations(each=EACH)
        if {one.attempt_id for one in observed} == self._assessed.keys():
            return False
        assessed: dict[AttemptId, Assessed | None] = {}
        for one in observed:
            known = one.attempt_id in self._assessed
            assessed[one.attempt_id] = self._assessed[one.attempt_id] if known else assess(one)
            if not known:
                await asyncio.sleep(0)  # others' turn: a first look at many takes a while
        experience = learn([one for one in assessed.values() if one is not None])
        for hardware in experience.speeds:
            experience.prepare(hardware)
            await asyncio.sleep(0)
        self._assessed, self._experience = assessed, experience
        return False

"""Gate between a daemon and its database, cloud and blob store, at which a test can kill, hold or break each call.

A passage is one call through the gate, named by its effect (`commit:apply(planned)`, `cloud:create`,
`blob:put spec.json`). Its number counts the passages of that name since the daemon's first start: `cloud:create#1`. A
life with its own part adds the part as a prefix: `preempted/cloud:create#1`.
"""

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

Moment = Literal["before", "after"]
"""`before` the call is forwarded, or `after` its answer came and before the answer is forwarded."""


@dataclass(frozen=True, kw_only=True, order=True)
class Point:
    """A passage at one of its two moments."""

    name: str
    number: int
    moment: Moment

    def __str__(self) -> str:
        return f"{self.moment} {self.name}#{self.number}"


async def _nothing() -> None:
    pass


def bare(name: str) -> str:
    """Return a passage's name without the part of its life."""
    return name.rpartition("/")[2]


@dataclass(kw_only=True)
class Gate:
    """Gate of one daemon. The connection of a refused passage is closed without an answer."""

    end: Callable[[], None] = lambda: None
    """Kills the daemon. No process of the daemon runs when the call returns."""
    kill_at: Point | None = None
    """Point at which the daemon is ended, once."""
    hold_at: Point | None = None
    """Point at which a passage waits for `hold`, once, and then continues."""
    hold: Callable[[], Awaitable[bool | None]] = _nothing
    """Coroutine function that `hold_at` awaits; if it returns False, the passage is refused."""
    held: int = 0
    part: str = ""
    """Name of the life's current part; empty: a part without a name."""
    opens: dict[str, str] = field(default_factory=dict)
    """Name of each part by the passage that begins it."""
    cuts: float = 0.0
    """Share of the passages that are refused at random, without a kill."""
    draw: random.Random = field(default_factory=random.Random)
    passages: list[Point] = field(default_factory=list)
    """Every passage in order, each as its point `before`."""
    killed: int = 0
    cut: int = 0
    _numbers: Counter[str] = field(default_factory=Counter)

    def called(self, name: str) -> str:
        """Return the full name of the current passage."""
        self.part = self.opens.pop(name, self.part)
        return f"{self.part}/{name}" if self.part else name

    def number(self, name: str) -> int:
        """Return the next number of this name. Call it once for each passage."""
        self._numbers[name] += 1
        self.passages.append(Point(name=name, number=self._numbers[name], moment="before"))
        return self._numbers[name]

    def count(self, name: str) -> int:
        """Return the number of passages of a name."""
        return self._numbers[name]

    def status_message(self) -> str:
        """Return a message with the state of the kill and hold orders, and with the last passages."""
        waits = " ".join(f"({point})" for point in (self.kill_at, self.hold_at) if point is not None)
        passed = ", ".join(f"{point.name}#{point.number}" for point in self.passages[-3:])
        done = f"{self.killed} killed, {self.held} held, {self.cut} cut"
        return f"{done}; waited for: {waits or 'nothing'}; passed last: {passed or 'nothing'}"

    async def passes_async(self, name: str, number: int, moment: Moment) -> bool:
        """Decide like `passes`, for a caller that can wait."""
        if self.hold_at == Point(name=name, number=number, moment=moment):
            self.hold_at = None
            self.held += 1
            goes_on = await self.hold() is not False
            return self.passes(name, number, moment) and goes_on
        return self.passes(name, number, moment)

    def passes(self, name: str, number: int, moment: Moment) -> bool:
        """Return False if the passage is refused."""
        if self.kill_at == Point(name=name, number=number, moment=moment):
            self.kill_at = None
            self.killed += 1
            self.end()
            return False
        if self.cuts and self.draw.random() < self.cuts:
            self.cut += 1
            return False
        return True

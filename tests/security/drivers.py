"""Interface of a transport under test: its own list of calls, and their outcomes. The verdict is the same for all."""

from collections.abc import Sequence
from typing import Any, Protocol

from tests.security.world import World


class Ask(Protocol):
    """One call as one caller. `label` is unique and holds no ID, so that it is the same in every world."""

    @property
    def label(self) -> str: ...


class Driver(Protocol):
    @property
    def name(self) -> str: ...

    def asks(self, world: World) -> Sequence[Any]:
        """Every call with every filter: the same labels in the same order in every world. Raises Unplayed."""
        ...

    async def answer(self, world: World, ask: Any) -> str:
        """All that the caller learns, as text. Raises ServerFault for what no call may ever answer."""
        ...


class Unplayed(Exception):
    """Something that the API takes has no values to try: give it some, or what it leaks is not found."""


class ServerFault(Exception):
    """The server failed, which compares equal to another failure and proves nothing."""

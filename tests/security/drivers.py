"""Interface of a transport under test: its own list of calls, and their outcomes. The verdict is the same for all."""

from collections.abc import Sequence
from typing import Any, Protocol

from tests.security.world import World


class Ask(Protocol):
    """Call by one caller. `label` is unique and contains no id, so that it is the same in every world."""

    @property
    def label(self) -> str: ...


class Driver(Protocol):
    @property
    def name(self) -> str: ...

    def asks(self, world: World) -> Sequence[Any]:
        """Return every call with every filter. Labels and order are the same in every world. Raises Unplayed."""
        ...

    async def answer(self, world: World, ask: Any) -> str:
        """Return everything that the caller learns, as text. Raises ServerFault for a failure of the server."""
        ...


class Unplayed(Exception):
    """Raised for a parameter without values to try. Give it some; otherwise its leaks are not found."""


class ServerFault(Exception):
    """Raised when the server fails: two failures compare equal, which proves nothing."""

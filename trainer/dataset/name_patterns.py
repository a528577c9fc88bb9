"""Glob patterns of file names: `*`, `**`, `?`, `[a-z]`, `{a,b}`.

Users send patterns to a daemon that is shared, so the time of a match is linear in the name's length, and bounded.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from operator import eq, ne

ALTERNATIVES = 64
"""Maximum number of patterns without braces to which one pattern expands."""
LENGTH = 1024
"""Maximum characters of a pattern."""
WORK = 5_000_000
"""Maximum number of positions of a pattern that are tried while names are matched; a few seconds."""
CACHED = 1 << 18
"""Maximum number of positions in the cache of the automaton."""
BRACES = re.compile(r"\{([^{}]*)\}")
TOKEN = re.compile(r"\*\*/|\*\*|\*|\?|\[[^\]/]+\]|.", re.DOTALL)
HIDDEN = re.compile(r"(^|/)\.")


class BadPattern(ValueError):
    """Error of a pattern. The message is one line without the pattern's place."""


@dataclass(frozen=True, slots=True)
class _Position:
    """Position in a pattern, before one token."""

    accepts: Callable[[str], bool] | None
    """Test of the character that leads to the next position; None: the end of a pattern."""
    stays: Callable[[str], bool] | None = None
    """Test of the characters that keep this position."""
    skips: tuple[int, ...] = ()
    """Distances to the positions that are reached without a character."""


class NamePattern:
    """Pattern of file names, matched by an automaton without backtracking. Hidden names never match."""

    def __init__(self, pattern: str) -> None:
        """Raise BadPattern for a pattern with too many alternatives or with a range such as `[z-a]`."""
        self._positions: list[_Position] = []
        self._cache: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        self._shared: dict[frozenset[int], frozenset[int]] = {}
        self._cached = self._work = 0
        starts = set[int]()
        for alternative in _alternatives(pattern + ("**" if pattern.endswith("/") else "")):
            starts.add(len(self._positions))
            for token in TOKEN.findall(alternative):
                self._positions += _of_token(token)
            self._positions.append(_Position(accepts=None))
        self._ends = frozenset(n for n, position in enumerate(self._positions) if position.accepts is None)
        self._starts = self._closed(starts)

    def selected(self, names: Iterable[str]) -> list[str]:
        """Return the names that match, sorted. Raises BadPattern if the matching takes too long."""
        return sorted(name for name in names if self._matches(name) and not HIDDEN.search(name))

    def _matches(self, name: str) -> bool:
        states = self._starts
        for character in name:
            following = self._cache.get((states, character))
            states = self._step(states, character) if following is None else following
            if not states:
                return False
        return not states.isdisjoint(self._ends)

    def _step(self, states: frozenset[int], character: str) -> frozenset[int]:
        """Return the positions after a character, and cache them."""
        self._work += len(states)
        if self._work > WORK:
            raise BadPattern("its pattern takes too long to match; use fewer wildcards")
        following = set[int]()
        for state in states:
            position = self._positions[state]
            if position.accepts is not None and position.accepts(character):
                following.add(state + 1)
            if position.stays is not None and position.stays(character):
                following.add(state)
        if self._cached > CACHED:
            self._cache.clear()
            self._shared.clear()
            self._cached = 0
        closed = self._closed(following)
        closed = self._shared.setdefault(closed, closed)  # equal sets are compared by identity in the cache
        self._cache[states, character] = closed
        self._cached += 1 + len(closed)
        return closed

    def _closed(self, states: set[int]) -> frozenset[int]:
        """Return the positions together with those that are reached without a character."""
        waiting, closed = list(states), set(states)
        while waiting:
            state = waiting.pop()
            for distance in self._positions[state].skips:
                if state + distance not in closed:
                    closed.add(state + distance)
                    waiting.append(state + distance)
        return frozenset(closed)


def _alternatives(pattern: str) -> list[str]:
    """Return the patterns without braces that together select what the pattern selects. Raises BadPattern."""
    if len(pattern) > LENGTH + 2:
        raise BadPattern(f"its pattern has more than {LENGTH} characters; shorten it")
    wholes = [pattern]
    while (braces := BRACES.search(wholes[0])) is not None:
        if len(wholes) * (1 + braces[1].count(",")) > ALTERNATIVES:
            raise BadPattern(f"its pattern has more than {ALTERNATIVES} alternatives in braces; use fewer, or `*`")
        wholes = [alternative for expanded in wholes for alternative in _without_first_braces(expanded)]
    return wholes


def _without_first_braces(pattern: str) -> list[str]:
    braces = BRACES.search(pattern)
    if braces is None:
        return [pattern]
    return [pattern[: braces.start()] + part + pattern[braces.end() :] for part in braces[1].split(",")]


def _of_token(token: str) -> list[_Position]:
    """Return the positions of one token. Raises BadPattern."""
    if token == "**/":
        return [_Position(accepts=_matches_nothing, skips=(1, 2)), _Position(accepts=partial(eq, "/"), stays=_always)]
    if token == "**":
        return [_Position(accepts=_matches_nothing, stays=_always, skips=(1,))]
    if token == "*":
        return [_Position(accepts=_matches_nothing, stays=partial(ne, "/"), skips=(1,))]
    if token == "?":
        return [_Position(accepts=partial(ne, "/"))]
    return [_Position(accepts=partial(eq, token) if len(token) == 1 else _of_class(token))]


def _of_class(token: str) -> Callable[[str], bool]:
    """Return the test of a class such as `[a-z]` or `[!a-z]`. Raises BadPattern."""
    inner = token[1:-1]
    negated = len(inner) > 1 and inner[0] in "!^"
    pieces = list[str]()
    for first, last, single in re.findall(r"(.)-(.)|(.)", inner[negated:], re.DOTALL):
        if first > last:
            raise BadPattern(f"its pattern has the range {first}-{last}, which is empty; write {last}-{first}")
        pieces.append(re.escape(single) or f"{re.escape(first)}-{re.escape(last)}")
    accepted = re.compile(f"[{'^' if negated else ''}{''.join(pieces)}]")
    return lambda character: character != "/" and accepted.match(character) is not None


def _always(character: str) -> bool:
    return True


def _matches_nothing(character: str) -> bool:
    return False

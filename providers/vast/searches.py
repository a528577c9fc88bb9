"""Answers of Vast's searches, kept between polls, because Vast accepts ten searches a minute."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from broker.domain.errors import OutcomeUnknown, ProviderError, Throttled
from broker.ports import Clock

KEEP_S = 300.0
"""Age in seconds up to which an answer is used while its search cannot be sent again [assumed]."""

Query = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SearchAnswer:
    """Rows of one search, and the time of the answer."""

    rows: Sequence[Any]
    seen_at: datetime
    at_s: float
    """Monotonic time of the answer in seconds."""


class SearchCache:
    """Latest answer of each search, by GPU; None: the search for all GPUs."""

    def __init__(self, clock: Clock, search: Callable[[Query], Awaitable[Sequence[Any]]]) -> None:
        self._clock, self._search = clock, search
        self._answers: dict[str | None, SearchAnswer] = {}
        self._tried: dict[str | None, int] = {}
        """Number of the latest try of each search."""
        self._tries = 0

    async def get(self, gpu: str | None, query: Query) -> SearchAnswer:
        """Return the answer of a search, or the kept one if the search fails. Raises its error if none is kept."""
        try:
            return await self._search_once(gpu, query)
        except (Throttled, OutcomeUnknown):
            if (earlier := self._recent_answer(gpu)) is None:
                raise
            return earlier

    async def get_some(self, queries: Mapping[str, Query], max_calls: int) -> Sequence[SearchAnswer]:
        """Return the answers of all searches. The `max_calls` oldest are sent again, up to the first failure."""
        for gpu in sorted(queries, key=lambda gpu: self._tried.get(gpu, 0))[: max(0, max_calls)]:
            try:
                await self._search_once(gpu, queries[gpu])
            except ProviderError:  # the answers of the other searches remain
                break
        return [answer for gpu in queries if (answer := self._recent_answer(gpu)) is not None]

    async def _search_once(self, gpu: str | None, query: Query) -> SearchAnswer:
        self._tries += 1
        rows = await self._search(query)
        self._tried[gpu] = self._tries
        answer = SearchAnswer(rows=rows, seen_at=self._clock.now(), at_s=self._clock.monotonic())
        self._answers[gpu] = answer
        return answer

    def _recent_answer(self, gpu: str | None) -> SearchAnswer | None:
        answer = self._answers.get(gpu)
        return answer if answer is not None and self._clock.monotonic() - answer.at_s <= KEEP_S else None

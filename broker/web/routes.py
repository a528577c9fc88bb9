"""Declarations of the pages' routes, with the scope that the session's token needs."""

from collections.abc import Callable
from dataclasses import dataclass, field

from broker.domain.tenancy import Scope
from broker.web.browser import VisitHandler


@dataclass(frozen=True, kw_only=True)
class PageRoute:
    method: str
    path: str
    handler: VisitHandler
    scope: Scope
    runs_to_end: bool
    """True if the handler is not cancelled when the browser disconnects."""
    streams: bool
    """True for an answer or a file that takes long; the limits of streams hold for it, not those of requests."""


@dataclass(frozen=True)
class Routes:
    """Routes of one group of pages."""

    items: list[PageRoute] = field(default_factory=list)

    def get(self, path: str, *, scope: Scope = "read", streams: bool = False) -> Callable[[VisitHandler], VisitHandler]:
        """Declare the decorated handler as a page."""
        return self._add("GET", path, scope, runs_to_end=False, streams=streams)

    def post(
        self, path: str, *, scope: Scope = "submit", runs_to_end: bool = True, streams: bool = False
    ) -> Callable[[VisitHandler], VisitHandler]:
        """Declare the decorated handler as a write, which only a page of this origin may send.

        `runs_to_end`: False if the write is one transaction after long checks. Then a browser that disconnects ends the
        checks, and no job is bought that no page has shown.
        """
        return self._add("POST", path, scope, runs_to_end=runs_to_end, streams=streams)

    def _add(
        self, method: str, path: str, scope: Scope, *, runs_to_end: bool, streams: bool
    ) -> Callable[[VisitHandler], VisitHandler]:
        def declare(handler: VisitHandler) -> VisitHandler:
            self.items.append(
                PageRoute(
                    method=method, path=path, handler=handler, scope=scope, runs_to_end=runs_to_end, streams=streams
                )
            )
            return handler

        return declare

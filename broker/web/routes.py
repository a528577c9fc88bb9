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


@dataclass(frozen=True)
class Routes:
    """Routes of one group of pages."""

    items: list[PageRoute] = field(default_factory=list)

    def get(self, path: str, *, scope: Scope = "read") -> Callable[[VisitHandler], VisitHandler]:
        """Declare the decorated handler as a page."""
        return self._add("GET", path, scope)

    def post(self, path: str, *, scope: Scope = "submit") -> Callable[[VisitHandler], VisitHandler]:
        """Declare the decorated handler as a write, which only a page of this origin may send."""
        return self._add("POST", path, scope)

    def _add(self, method: str, path: str, scope: Scope) -> Callable[[VisitHandler], VisitHandler]:
        def declare(handler: VisitHandler) -> VisitHandler:
            self.items.append(PageRoute(method=method, path=path, handler=handler, scope=scope))
            return handler

        return declare

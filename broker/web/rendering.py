"""Templates to responses, with the security headers of every page."""

from datetime import datetime
from functools import cache
from typing import Any

from aiohttp import web
from jinja2 import Environment, PackageLoader, StrictUndefined

from broker.web import formats
from broker.web.static_files import static_url

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
"""Content security policy: nothing from other hosts, no inline script or style, no frames."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
NAVIGATION = (
    ("/ui/jobs", "Jobs"), ("/ui/new", "New job"), ("/ui/compare", "Compare"), ("/ui/offers", "Offers"),
    ("/ui/estimate", "Estimate"), ("/ui/spend", "Spend"), ("/ui/team", "Team"),
)  # fmt: skip
"""Links of every page."""
MAX_SEGMENTS = 10
"""Segments of a path that may name a page. Paths of strangers can have thousands."""
THEMES = ("auto", "light", "dark")
THEME_COOKIE = "gpubroker-theme"


@cache
def environment() -> Environment:
    """Return the templates. An undefined name is an error, and every value is escaped."""
    templates = Environment(
        loader=PackageLoader("broker.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    names = ("money", "ago", "moment", "clock", "size", "gpu", "cloud", "market", "duration", "text")
    templates.filters.update({name: getattr(formats, name) for name in names})
    templates.globals["nav"] = NAVIGATION
    templates.globals["static"] = static_url
    return templates


def theme_of(request: web.Request) -> str:
    """Return the theme that the browser chose; `auto`: the system's."""
    theme = request.cookies.get(THEME_COOKIE, "auto")
    return theme if theme in THEMES else "auto"


def _return_path(request: web.Request) -> str:
    """Return the address to which the choice of a theme leads back: this page; for a write, the page above it."""
    if request.method == "GET":
        return request.path_qs
    parts = request.rel_url.raw_path.split("/", MAX_SEGMENTS)[:MAX_SEGMENTS]
    above = ("/".join(parts[:count]) for count in range(len(parts), 1, -1))
    return next((path for path in above if _is_page(request.app, path)), "")


def _is_page(app: web.Application, path: str) -> bool:
    """Return True if these pages answer a GET of the path."""
    for resource in app.router.resources():
        info = resource.get_info()
        pattern = info.get("pattern")
        matches = info.get("path") == path if pattern is None else pattern.fullmatch(path) is not None
        if matches and any(route.method == "GET" for route in resource):
            return True
    return False


def rendered(request: web.Request, template: str, now: datetime, status: int = 200, **values: Any) -> web.Response:
    """Return a page. `now`: the time that ages are counted to."""
    variables: dict[str, Any] = {
        "now": now, "theme": theme_of(request), "here": _return_path(request), "path": request.path, "caller": None,
    }  # fmt: skip
    html = environment().get_template(template).render(variables | values)
    headers = {**HEADERS, "Cache-Control": "no-store"}
    response = web.Response(text=html, status=status, content_type="text/html", charset="utf-8", headers=headers)
    response.enable_compression()
    return response

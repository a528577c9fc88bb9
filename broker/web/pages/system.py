"""The installation, for operators: readiness, providers, orphans, launchers, brokers and versions."""

import asyncio
import platform
from collections.abc import Awaitable, Mapping
from functools import cache
from importlib.metadata import version
from typing import TypeVar

from aiohttp import web
from pydantic import ValidationError

from broker.api.core.readiness import ANSWER_S, answer_within
from broker.api.http.context import READINESS
from broker.api.schemas.base import PART_FIXES
from broker.api.service import offers
from broker.domain.errors import GpubrokerError
from broker.domain.offer import CredentialCheck
from broker.web.browser import Visit
from broker.web.routes import Routes
from trainer.contract import object_keys
from trainer.contract.documents import Lease

routes = Routes()
T = TypeVar("T")
PACKAGES = ("gpubroker", "aiohttp", "asyncpg")
SHOWN = 200
"""Maximum number of orphans and launchers on the page."""
NOT_CHECKED: Mapping[str, CredentialCheck] = {}


@routes.get("/ui/system", scope="admin")
async def system(visit: Visit) -> web.Response:
    """Show the state of the installation, from memory and the database."""
    return await _page(visit, NOT_CHECKED)


@routes.post("/ui/system/check", scope="admin", runs_to_end=False)
async def check(visit: Visit) -> web.Response:
    """Check the credentials of every provider, as `gpubroker doctor` does."""
    return await _page(visit, await visit.service.check_providers(), has_checked=True)


async def _page(visit: Visit, checks: Mapping[str, CredentialCheck], *, has_checked: bool = False) -> web.Response:
    parts, launches, counts, lease = await asyncio.gather(
        visit.request.app[READINESS].check(),
        _result_in_time(visit.service.store.unproven_launches()),
        _result_in_time(visit.service.store.counts()),
        _lease(visit),
    )
    orphans = visit.service.orphans()
    return visit.page(
        "system.html",
        parts=parts,
        fixes=PART_FIXES if launches is None else {**PART_FIXES, "database": ""},  # it answers: its clock is at fault
        providers=offers.providers(visit.service.quotes.market, checks).items,
        has_checked=has_checked,
        orphans=orphans[:SHOWN],
        orphan_count=len(orphans),
        launches=None if launches is None else launches[:SHOWN],
        launch_count=len(launches or ()),
        counts=counts or {},
        lease=lease,
        versions=_versions(),
    )


async def _lease(visit: Visit) -> Lease | None:
    """Return the lease of the broker that renewed it last; None: there is none, or it cannot be read."""
    try:
        raw = await _result_in_time(visit.service.blobs.get(object_keys.BROKER_LEASE))
        return None if raw is None else Lease.model_validate_json(raw)
    except ValidationError:
        return None


async def _result_in_time(call: Awaitable[T]) -> T | None:
    """Return the result of a call; None: it failed, or did not end within ANSWER_S."""
    try:
        return await answer_within(ANSWER_S, call)
    except (GpubrokerError, TimeoutError):
        return None


@cache
def _versions() -> Mapping[str, str]:
    return {"Python": platform.python_version()} | {name: version(name) for name in PACKAGES}

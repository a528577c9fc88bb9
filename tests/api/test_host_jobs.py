"""Jobs and shells on the daemon's host: a submit token must not become the daemon's user."""

from collections.abc import Awaitable, Callable

import pytest

from broker.controllers.market.host_offers import host_offers, refused_offers
from broker.daemon.host_admissions import HostAdmissions
from broker.policy.host_access import HostRules
from broker.ports import Store
from tests.api.harness import CSV, FixedMarket, Running, memory_blobs, serving, spec

HERE = {"resources": {"providers": ["simulated"]}}


async def _cannot() -> str:
    return "unshare is not installed"


async def _can() -> str:
    return ""


async def _on_host(running: Running, rules: HostRules) -> None:
    running.market.runs_on_host = True
    running.service.quotes.host_access = HostAdmissions(running.service.store, rules, running.service.clock, _cannot)


async def test_submit_token_cannot_reach_the_host(store: Store) -> None:
    """The refusal names the setting, and the quote gives the same reason for each offer of the host."""
    async with serving(store, memory_blobs()) as running:
        await _on_host(running, HostRules())
        await running.token("local", "read", "submit", "admin")
        ann = await running.token("ann", team="red")
        ref = (await running.upload(ann, CSV))["ref"]
        for body in (spec(ref, **HERE), spec(ref)):
            refused = await running.call("POST", "/v1/jobs", ann, 422, json=body)
            assert "providers.local.teams" in str(refused)


@pytest.mark.parametrize("trusted", [False, True])
async def test_operator_of_several_teams_needs_trust(store: Store, trusted: bool) -> None:
    async with serving(store, memory_blobs()) as running:
        await _on_host(running, HostRules(trusted=trusted))
        operator = await running.token("local", "read", "submit", "admin")
        ref = (await running.upload(operator, CSV))["ref"]
        await running.call("POST", "/v1/jobs", operator, 202, json=spec(ref, **HERE))  # still the only user
        await running.token("ann", team="red")
        running.service.quotes.host_access = HostAdmissions(
            store, HostRules(trusted=trusted), running.service.clock, _cannot
        )
        status = 202 if trusted else 422
        await running.call("POST", "/v1/jobs", operator, status, json=spec(ref, name="again", **HERE))


async def test_placement_excludes_the_host_for_a_later_second_team(store: Store) -> None:
    """A job that was admitted at submit is checked again, since a team may appear before it is placed."""
    market = FixedMarket(runs_on_host=True)
    async with serving(store, memory_blobs()) as running:
        offers = host_offers(market.offers(), market.caps())
        await running.token("local", "read", "submit", "admin")
        access = HostAdmissions(store, HostRules(), running.service.clock, _cannot)
        assert await refused_offers(access, ("default", "local"), offers) == {}
        await running.token("ann", team="red")
        access = HostAdmissions(store, HostRules(), running.service.clock, _cannot)
        assert set(await refused_offers(access, ("default", "local"), offers)) == set(offers)
        assert set(await refused_offers(access, ("red", "ann"), offers)) == set(offers)
        assert await refused_offers(access, ("red", "ann"), host_offers(market.offers(), {})) == {}


@pytest.mark.parametrize("problem", [_can, _cannot])
async def test_listed_team_is_admitted_where_jobs_can_be_isolated(
    store: Store, problem: Callable[[], Awaitable[str]]
) -> None:
    """The refusal of an untrusted host gives the reason why this host cannot isolate jobs."""
    async with serving(store, memory_blobs()) as running:
        await running.token("local", "read", "submit", "admin")
        ann = await running.token("ann", team="red")
        ref = (await running.upload(ann, CSV))["ref"]
        running.market.runs_on_host = True
        rules = HostRules(teams=("red",))
        running.service.quotes.host_access = HostAdmissions(store, rules, running.service.clock, problem)
        status = 202 if problem is _can else 422
        answer = await running.call("POST", "/v1/jobs", ann, status, json=spec(ref, **HERE))
        assert ("unshare is not installed" in str(answer)) == (problem is _cannot)

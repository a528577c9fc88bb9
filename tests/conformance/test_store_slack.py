"""Links from Slack users to owners belong to one team, are visible to that team alone, and are audited."""

import asyncio
from dataclasses import replace

import pytest

from broker.domain.errors import StoreError
from broker.domain.notifications import SlackUser
from broker.domain.tenancy import DEFAULT_TEAM, Tenant
from broker.ports import AuditFilter, Store, Token
from tests.conformance.samples import START

ANN = Tenant(team=DEFAULT_TEAM, owner="ann")
NLP = Tenant(team="nlp", owner="eve")


def link(team: str = DEFAULT_TEAM, **changes: object) -> SlackUser:
    slack_user = SlackUser(
        team=team, workspace="T1", user="U1", owner="ann", scopes=("read", "submit"), name="Ann", linked_by="ann"
    )
    return replace(slack_user, **changes)  # type: ignore[arg-type]


def plain(found: SlackUser) -> SlackUser:
    return replace(found, linked_at=None)


async def test_a_link_is_made_changed_and_removed(store: Store) -> None:
    tenant = store.as_tenant(ANN)
    await tenant.put_slack_user(link())
    await tenant.put_slack_user(link(owner="bob", scopes=("read",)))
    await tenant.put_slack_user(link(user="U2"))
    assert [plain(u) for u in await tenant.slack_users("T1", "U1")] == [link(owner="bob", scopes=("read",))]
    assert [u.user for u in await tenant.slack_users()] == ["U1", "U2"]
    assert await tenant.slack_users("T2") == []
    assert await tenant.delete_slack_user(link())
    assert not await tenant.delete_slack_user(link())
    entries = [
        (e.action, e.target, e.before, e.after) for e in await tenant.audit(AuditFilter(action="slack", target="T1/U1"))
    ]
    ann, bob = {"owner": "ann", "scopes": ["read", "submit"]}, {"owner": "bob", "scopes": ["read"]}
    assert entries[::-1] == [
        ("slack.link", "T1/U1", None, ann), ("slack.link", "T1/U1", ann, bob), ("slack.unlink", "T1/U1", bob, None),
    ]  # fmt: skip


async def test_another_team_sees_and_changes_nothing(store: Store) -> None:
    await store.put_team("nlp", "")
    await store.as_tenant(ANN).put_slack_user(link())
    other = store.as_tenant(NLP)
    assert await other.slack_users() == []
    assert await other.slack_users("T1", "U1") == []
    assert not await other.delete_slack_user(link())
    with pytest.raises(StoreError):
        await other.put_slack_user(link())
    with pytest.raises(StoreError):
        await store.put_slack_user(link(team="nowhere"))
    await other.put_slack_user(link(team="nlp", owner="eve"))
    assert [u.owner for u in await store.slack_users("T1", "U1")] == ["ann", "eve"]
    assert [u.owner for u in await store.as_tenant(ANN).slack_users()] == ["ann"]


async def test_links_go_with_their_team(store: Store) -> None:
    await store.put_team("nlp", "")
    await store.put_slack_user(link(team="nlp"))
    await store.delete_team("nlp")
    assert await store.slack_users() == []


def token(token_id: str, owner: str = "ann", team: str = DEFAULT_TEAM) -> Token:
    return Token(id=token_id, team=team, owner=owner, scopes=("read",), created_at=START)


async def test_links_go_with_the_last_token_of_their_owner(store: Store) -> None:
    await store.put_team("nlp", "")
    for team in (DEFAULT_TEAM, "nlp"):
        await store.put_slack_user(link(team=team))
        await store.put_slack_user(link(team=team, user="U2"))
        await store.put_slack_user(link(team=team, user="U3", owner="bob"))
        await store.put_token(token(f"{team}1", team=team), f"{team}1")
    await store.put_token(token("a2"), "a2")
    tenant = store.as_tenant(ANN)
    assert await tenant.delete_token("default1")
    assert len(await tenant.slack_users()) == 3, "one token is left"
    assert await tenant.delete_token("a2")
    assert [u.user for u in await tenant.slack_users()] == ["U3"], "bob never had a token"
    assert len(await store.as_tenant(NLP).slack_users()) == 3, "who she is elsewhere stays"
    entries = [(e.action, e.target, e.actor) for e in await tenant.audit(AuditFilter(action="slack.unlink"))]
    assert sorted(entries) == [("slack.unlink", "T1/U1", "ann"), ("slack.unlink", "T1/U2", "ann")]


async def test_two_last_tokens_that_go_at_once_leave_no_link(store: Store) -> None:
    await store.put_slack_user(link())
    for number in range(8):
        await store.put_token(token(f"t{number}"), f"t{number}")
    await asyncio.gather(*(store.as_tenant(ANN).delete_token(f"t{number}") for number in range(8)))
    assert await store.slack_users() == []

"""Teams, tokens, rate limits and the audit."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from broker.api.http.context import AUTH
from broker.api.service.quotes import RECENTLY_UNAVAILABLE
from broker.runtime.token_bucket import TokenBucketRate
from tests.api.harness import Running, spec
from tests.conformance.samples import ManualClock


async def test_a_token_lives_from_its_making_to_its_revocation(api: Running) -> None:
    root = await api.token("root", "admin")
    made = await api.call("POST", "/v1/tokens", root, 201, json={"owner": "ada", "scopes": ["read"], "note": "laptop"})
    ada = {"Authorization": f"Bearer {made['token']}"}
    assert await api.call("GET", "/v1/me", ada, 200) == {"team": "default", "owner": "ada", "scopes": ["read"]}
    listed = await api.call("GET", "/v1/tokens", root, 200)
    assert made["id"] in {t["id"] for t in listed["items"]}
    assert made["token"] not in json.dumps(listed)
    await api.call("DELETE", f"/v1/tokens/{made['id']}", root, 204)
    await api.call("GET", "/v1/me", ada, 401)
    await api.call("DELETE", f"/v1/tokens/{made['id']}", root, 404)


async def test_a_manager_grants_and_revokes_only_own_scopes_in_its_own_team(api: Running) -> None:
    boss = await api.token("mia", "read", "manage", team="red")
    root = await api.token("root", "admin")
    made = await api.call("POST", "/v1/tokens", boss, 201, json={"owner": "ada", "scopes": ["read"]})
    assert made["team"] == "red"
    for scope in ("submit", "metrics", "admin"):
        refused = await api.call("POST", "/v1/tokens", boss, 403, json={"owner": "ada", "scopes": ["read", scope]})
        assert f"may not give the scope '{scope}'" in refused["detail"]
    refused = await api.call(
        "POST", "/v1/tokens", boss, 422, json={"owner": "a", "scopes": ["read"], "team": "default"}
    )
    assert refused["errors"][0]["field"] == "team"
    above = await api.call("POST", "/v1/tokens", root, 201, json={"owner": "op", "scopes": ["admin"], "team": "red"})
    elsewhere = await api.call("POST", "/v1/tokens", root, 201, json={"owner": "op", "scopes": ["read"]})
    await api.call("DELETE", f"/v1/tokens/{above['id']}", boss, 403)
    await api.call("DELETE", f"/v1/tokens/{elsewhere['id']}", boss, 404)
    shown = await api.call("GET", "/v1/tokens", boss, 200)
    assert {t["team"] for t in shown["items"]} == {"red"}
    await api.call("DELETE", f"/v1/tokens/{made['id']}", boss, 204)


async def test_an_expired_token_is_refused_as_an_unknown_one_is(api: Running) -> None:
    api.app[AUTH]._clock = clock = ManualClock()
    root = await api.token("root", "admin")
    over = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    refused = await api.call("POST", "/v1/tokens", root, 422, json={"owner": "ada", "expires_at": over})
    assert refused["errors"][0]["field"] == "expires_at"
    clock.time = datetime.now(UTC)
    until = (clock.time + timedelta(hours=1)).isoformat()
    made = await api.call("POST", "/v1/tokens", root, 201, json={"owner": "ada", "expires_at": until})
    ada = {"Authorization": f"Bearer {made['token']}"}
    await api.call("GET", "/v1/me", ada, 200)
    clock.time += timedelta(hours=1)
    unknown = await api.call("GET", "/v1/me", {"Authorization": f"Bearer gb_{'a' * 8}_{'a' * 32}"}, 401)
    assert await api.call("GET", "/v1/me", ada, 401) == unknown


async def test_a_token_cannot_create_one_that_outlives_it(api: Running) -> None:
    admin = await api.token("ada", "admin")
    ends = (datetime.now(UTC) + timedelta(minutes=1)).replace(microsecond=0)
    wish = {"owner": "mia", "scopes": ["read", "manage"]}
    maker = await api.call("POST", "/v1/tokens", admin, 201, json=wish | {"expires_at": ends.isoformat()})
    me = {"Authorization": f"Bearer {maker['token']}"}
    made = await api.call("POST", "/v1/tokens", me, 201, json=wish)
    assert datetime.fromisoformat(made["expires_at"]) == ends
    later = wish | {"expires_at": (ends + timedelta(seconds=1)).isoformat()}
    refused = await api.call("POST", "/v1/tokens", me, 422, json=later)
    assert refused["errors"][0]["field"] == "expires_at"
    forever = await api.call("POST", "/v1/tokens", admin, 201, json=wish)
    assert forever["expires_at"] is None


async def test_a_team_is_made_used_and_removed(api: Running) -> None:
    root, boss = await api.token("root", "admin"), await api.token("mia", "read", "manage")
    assert (await api.call("POST", "/v1/teams", root, 201, json={"name": "blue", "note": "b"}))["name"] == "blue"
    await api.call("POST", "/v1/teams", root, 409, json={"name": "blue"})
    wish = {"owner": "bob", "team": "blue", "scopes": ["read", "submit"]}
    bob = {"Authorization": "Bearer " + (await api.call("POST", "/v1/tokens", root, 201, json=wish))["token"]}
    assert [t["name"] for t in (await api.call("GET", "/v1/teams", bob, 200))["items"]] == ["blue"]
    assert [t["name"] for t in (await api.call("GET", "/v1/teams", boss, 200))["items"]] == ["default"]
    assert len((await api.call("GET", "/v1/teams", root, 200))["items"]) == 2
    await api.call("PUT", "/v1/secrets/KEY", bob, 204, json={"value": "x"})
    await api.call("DELETE", "/v1/teams/blue", root, 204)
    await api.call("GET", "/v1/me", bob, 401)
    await api.call("DELETE", "/v1/teams/blue", root, 404)
    assert "stays" in (await api.call("DELETE", "/v1/teams/default", root, 409))["detail"]
    again = {"Authorization": (await api.token("bob", team="blue"))["Authorization"]}
    assert await api.call("GET", "/v1/secrets", again, 200) == {"names": []}


async def test_a_team_with_a_job_stays(api: Running) -> None:
    root, bob = await api.token("root", "admin"), await api.token("bob", team="blue")
    await api.call("POST", "/v1/jobs", bob, 202, json=spec((await api.upload(bob))["ref"]))
    assert "has jobs" in (await api.call("DELETE", "/v1/teams/blue", root, 409))["detail"]
    assert (await api.call("GET", "/v1/jobs", bob, 200))["items"] != []


async def test_the_audit_records_each_write_once_and_no_refusal(api: Running) -> None:
    boss = await api.token("mia", "read", "submit", "manage", team="red")
    await api.call("PUT", "/v1/secrets/HF_TOKEN", boss, 204, json={"value": "hf_verysecret"})
    body = spec((await api.upload(boss))["ref"])
    key = {**boss, "Idempotency-Key": "once"}
    job = (await api.call("POST", "/v1/jobs", key, 202, json=body))["id"]
    await api.call("POST", "/v1/jobs", key, 202, json=body)
    await api.call("POST", "/v1/jobs", key, 409, json={**body, "cap_usd": "6"})
    await api.call("PATCH", f"/v1/jobs/{job}", boss, 200, json={"cap_usd": "7.50"})
    await api.call("PATCH", f"/v1/jobs/{job}", boss, 200, json={"cap_usd": "7.50"})
    await api.call("PATCH", f"/v1/jobs/{job}", boss, 422, json={"cap_usd": "7.49"})
    await api.call("POST", f"/v1/jobs/{job}/cancel", boss, 202)
    await api.call("POST", f"/v1/jobs/{job}/cancel", boss, 202)
    token = await api.call("POST", "/v1/tokens", boss, 201, json={"owner": "ada", "scopes": ["read"]})
    await api.call("DELETE", f"/v1/tokens/{token['id']}", boss, 204)
    await api.call("DELETE", "/v1/secrets/HF_TOKEN", boss, 204)
    entries = await audit(api, boss, "actor=mia")
    assert [(e["action"], e["target"]) for e in reversed(entries)] == [
        ("secret.set", "HF_TOKEN"),
        ("upload.put", body["train"]["data"]["path"].removeprefix("upload:")),
        ("job.submit", job),
        ("job.raise_cap", job),
        ("job.stop", job),
        ("token.create", token["id"]),
        ("token.delete", token["id"]),
        ("secret.delete", "HF_TOKEN"),
    ]
    raised = entries[4]
    assert (raised["before"], raised["after"]) == ({"cap_usd": "5.00"}, {"cap_usd": "7.50"})
    assert [e["usd"] for e in entries[4:6]] == ["2.50", "5.00"]
    assert {(e["team"], e["token_id"]) for e in entries} == {("red", boss["Authorization"].split("_")[1])}
    assert "hf_verysecret" not in json.dumps(entries)
    assert token["token"] not in json.dumps(entries)


async def audit(api: Running, who: dict[str, str], query: str = "") -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = (await api.call("GET", f"/v1/audit?{query}", who, 200))["items"]
    return entries


async def test_the_audit_is_filtered_paged_and_the_team_s_own(api: Running) -> None:
    red, blue = await api.token("mia", "submit", "manage", team="red"), await api.token("bob", "manage", team="blue")
    root = await api.token("root", "admin")
    for name in ("A", "B", "C"):
        await api.call("PUT", f"/v1/secrets/{name}", red, 204, json={"value": "x"})
    assert [e["target"] for e in await audit(api, red, "action=secret")] == ["C", "B", "A"]
    assert [e["target"] for e in await audit(api, red, "action=secret.set&target=B")] == ["B"]
    assert await audit(api, red, "action=secret.delete") == []
    first = await api.call("GET", "/v1/audit?action=secret&limit=2", red, 200)
    assert [e["target"] for e in first["items"]] == ["C", "B"]
    rest = await api.call("GET", f"/v1/audit?action=secret&limit=2&cursor={first['next']}", red, 200)
    assert ([e["target"] for e in rest["items"]], rest["next"]) == (["A"], None)
    assert {e["team"] for e in await audit(api, blue, "team=red")} == {"blue"}
    assert {e["team"] for e in await audit(api, root, "team=red")} == {"red"}
    assert await audit(api, root, "until=2000-01-01T00:00:00Z") == []
    await api.call("GET", "/v1/audit?cursor=nonsense", red, 422)


async def test_a_token_that_calls_too_fast_gets_a_retry_time(api: Running) -> None:
    auth, clock = api.app[AUTH], ManualClock()
    auth._clock, auth._rate = clock, TokenBucketRate(per_s=0.5, burst=3)
    ada, bob = await api.token("ada"), await api.token("bob")
    for _ in range(3):
        await api.call("GET", "/v1/me", ada, 200)
    async with api.http.get(f"{api.url}/v1/me", headers=ada) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "2")
        assert (await response.json())["detail"] == "this token calls more than 0.5 times a second; slow down"
    await api.call("GET", "/v1/me", bob, 200)
    clock.time += timedelta(seconds=2)
    await api.call("GET", "/v1/me", ada, 200)
    await api.call("GET", "/v1/me", ada, 429)


async def test_only_operators_see_why_an_offer_is_blocked(api: Running) -> None:
    """The reason is a cloud's message about the machine of some team."""
    offer = api.market.items[0].id
    await api.service.store.block_offer(offer, "gb-test-abcdefghijklm never came up", for_s=60)
    reasons = []
    for who in (await api.token("mia", team="red"), await api.token("root", "admin")):
        body = spec((await api.upload(who))["ref"])
        quote = await api.call("POST", "/v1/quotes?limit=1000", who, 200, json=body)
        (line,) = [line for line in quote["lines"] if line["offer"]["id"] == offer]
        assert line["drop"] == "excluded"
        reasons.append(line["reason"])
    assert reasons == [RECENTLY_UNAVAILABLE, "gb-test-abcdefghijklm never came up"]

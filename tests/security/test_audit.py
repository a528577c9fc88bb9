"""Every write leaves an audit entry, and no refused call does."""

from broker.domain.tenancy import Tenant
from broker.ports import AuditFilter
from broker.runtime.clock import SystemClock
from tests.security.http_asks import HttpAsk, http_asks
from tests.security.world import World, world
from tests.support.memory_store.store import MemoryStore

READ_ONLY_OPERATIONS = {
    *("quote", "what_if", "dry_run_policy", "check_providers", "test_channel", "slack_request"),
    "create_sign_in_link",  # sessions are kept in the broker's memory, with no more rights than the token
}
"""Operations other than GET that change nothing here."""
UNSUPPORTED_OPERATIONS = {"refuse_job", "link_slack_user", "unlink_slack_user", "import_data"}
"""Operations whose rows do not exist here: a job that awaits approval, a Slack workspace, a host of data."""
OPERATORS = {"create_team", "delete_team"}
LIMIT = 10_000


async def entries(world: World) -> int:
    return len(await world.api.service.store.audit(AuditFilter(limit=LIMIT)))


async def status(world: World, ask: HttpAsk) -> int:
    body = {"json": ask.json} if ask.json is not None else {"data": ask.data}
    url = world.api.url + ask.path
    async with world.api.http.request(ask.method, url, params=ask.query, headers=ask.headers, **body) as response:
        return response.status


async def test_every_write_is_audited_and_no_refusal_is() -> None:
    written, audited = set[str](), set[str]()
    async with world(MemoryStore(SystemClock()), blue=True) as both:
        operator = await both.api.token("root", "admin")
        for ask in http_asks(both):
            name = ask.label.split()[0]
            if ask.method == "GET" or name in READ_ONLY_OPERATIONS:
                continue
            if name in OPERATORS and "without" not in ask.label:
                ask = HttpAsk(**{**vars(ask), "headers": operator})
            before = await entries(both)
            answer, grown = await status(both, ask), await entries(both) - before
            written.add(name)
            if answer >= 400:
                assert grown == 0, f"{ask.label}: {answer}"
            elif grown:
                audited.add(name)
        actors = {entry.actor for entry in await both.api.service.store.as_tenant(
            Tenant(team="red", owner="x")).audit(AuditFilter(limit=LIMIT))}  # fmt: skip
    assert written - audited == UNSUPPORTED_OPERATIONS
    assert actors == {"ann", "gpubroker"}

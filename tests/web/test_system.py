"""The page of the installation, for operators."""

import asyncio
from datetime import timedelta
from decimal import Decimal

import pytest

from broker.api.core import readiness
from broker.api.http.context import READINESS
from broker.domain.instance import OrphanMachine
from broker.domain.offer import CredentialCheck
from broker.web.pages import system
from tests.api.harness import Running
from tests.web.test_security import HOSTILE
from tests.web.visitor import Visitor


async def test_only_operators_see_the_system(api: Running, ada: Visitor) -> None:
    assert "/ui/system" not in (await ada.get("/ui/jobs")).text
    assert (await ada.get("/ui/system")).status == 403
    assert (await ada.send("/ui/system/check")).status == 403


async def test_the_system_shows_health_providers_orphans_and_versions(api: Running) -> None:
    async def checks() -> dict[str, CredentialCheck]:
        return {"simulated": CredentialCheck(problem="its key is refused; set SIMULATED_KEY", identity=None)}

    async with Visitor(api) as root:
        await root.sign_in(await api.token("root", "read", "admin"))
        assert 'href="/ui/system"' in (await root.get("/ui/jobs")).text
        empty = (await root.get("/ui/system")).text
        for text in ("database", "No machine without a job", "No ending attempt waits", "gpubroker", "2 rows dropped"):
            assert text in empty, text
        assert "its key is refused" not in empty
        api.service.check_providers = checks
        checked = await root.send("/ui/system/check")
        assert "its key is refused; set SIMULATED_KEY" in checked.text
        born = api.service.clock.now() - timedelta(hours=3)
        orphan = OrphanMachine(
            provider="vast", id=HOSTILE, name="gpubroker-x", why="its attempt has ended", since=born,
            usd_per_hour=Decimal("1.25"),
        )  # fmt: skip
        api.service.orphans = lambda: [orphan]
        page = (await root.get("/ui/system")).text
    for text in ("its attempt has ended", "1.25", "3 h ago", "&lt;script&gt;alert"):
        assert text in page, text
    assert "<script>alert" not in page


async def test_a_part_that_fails_is_named_with_its_fix(api: Running) -> None:
    api.service.claim_fault = lambda: "the controllers cannot claim jobs"
    async with Visitor(api) as root:
        await root.sign_in(await api.token("root", "read", "admin"))
        page = (await root.get("/ui/system")).text
    assert "the controllers cannot claim jobs; restart `gpubroker serve` and see its log" in page


async def test_a_clock_that_was_set_is_not_mended_by_another_database(
    api: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.app[READINESS], "_clock_step", lambda: 900.0)
    async with Visitor(api) as root:
        await root.sign_in(await api.token("root", "read", "admin"))
        page = (await root.get("/ui/system")).text
    assert "clock was set" in page
    assert "names another server" not in page
    assert "No ending attempt waits" in page


async def test_stores_that_hang_are_named_and_what_is_unknown_is_said(
    api: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: object) -> None:
        await asyncio.Event().wait()

    async with Visitor(api) as root:
        await root.sign_in(await api.token("root", "read", "admin"))
        for module in (readiness, system):
            monkeypatch.setattr(module, "ANSWER_S", 0.05)
        monkeypatch.setattr(api.service.blobs, "get", hang)
        monkeypatch.setattr(api.service.store, "unproven_launches", hang)
        page = (await root.get("/ui/system")).text
    assert "the blob store does not answer" in page
    assert "Not known: the database did not answer." in page
    assert "No ending attempt waits" not in page

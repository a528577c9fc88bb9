"""The pages in a real browser: no console error, no violation of the policy, no failed request."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.harness import CSV, MODEL, Running
from tests.web.screenshots import CHROMIUM
from tests.web.seed import fill
from tests.web.test_metrics import saved

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed; run `make venv`")
pytestmark = pytest.mark.skipif(not Path(CHROMIUM).exists(), reason=f"no {CHROMIUM}; run `make browser`")

REPLACED = ("htmx:afterRequest", "htmx:sendAbort")
"""Starts of console messages of htmx about a request in flight that a newer one of the same form replaced."""


def is_fault(message: Any) -> bool:
    return message.type in ("error", "warning") and not message.text.startswith(REPLACED)


@pytest.fixture
async def page(api: Running) -> AsyncIterator[Any]:
    """Yield a page that is signed in by a one-time link; anything that goes wrong in it fails the test."""
    faults: list[str] = []
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = await browser.new_page()
        opened.set_default_timeout(60_000)
        opened.on("console", lambda m: faults.append(f"console: {m.text}") if is_fault(m) else None)
        opened.on("pageerror", lambda e: faults.append(f"error: {e}"))
        opened.on("response", lambda r: faults.append(f"{r.status} {r.url}") if r.status >= 400 else None)
        link = await api.call("POST", "/v1/me/sign-in-links", await api.token("ada"), 201)
        await opened.goto(api.url + link["path"])
        yield opened
        await browser.close()
    assert faults == []


async def test_a_job_is_quoted_while_typing_and_submitted(api: Running, page: Any, tmp_path: Path) -> None:
    file = tmp_path / "words.csv"
    file.write_text(CSV)
    await page.get_by_role("link", name="New job", exact=True).click()
    await page.locator("#file").set_input_files(file)  # sends the form by itself
    await page.get_by_text("columns word, definition").wait_for()
    await page.locator("#f-model").fill(MODEL)
    await page.get_by_text("30 offers fit").wait_for()
    await page.locator("#f-cap_usd").fill("-1")
    await page.locator("#fault-cap_usd:not(:empty)").wait_for()
    await page.locator("#f-task").select_option("dpo")
    await page.locator("#f-chosen").wait_for()
    await page.locator("#f-task").select_option("causal_lm")
    await page.locator("#f-messages").wait_for()
    await page.locator("#f-cap_usd").fill("4")
    await page.locator("#f-cap_usd").press("Enter")  # quotes, and submits nothing
    await page.get_by_role("button", name="Submit, at most $4").click()
    await page.get_by_role("heading", name="words").wait_for()
    jobs = (await api.call("GET", "/v1/jobs", await api.token("ada"), 200))["items"]
    assert [(job["name"], job["cap_usd"]) for job in jobs] == [("words", "4")]


async def test_a_run_follows_the_run_without_a_reload(api: Running, page: Any) -> None:
    ref = (await api.upload(me := await api.token("ada")))["ref"]
    body = {"name": "cynic", "cap_usd": "5", "train": {"model": MODEL, "data": {"path": ref, "completion": "{word}"}}}
    job = await api.call("POST", "/v1/jobs", me, 202, json=body)
    await page.goto(f"{api.url}/ui/jobs/{job['id']}")
    await page.get_by_text("waiting").first.wait_for()
    await api.call("PATCH", f"/v1/jobs/{job['id']}", me, 200, json={"cap_usd": "7"})
    await page.get_by_text("of $7.00").first.wait_for()


async def test_the_theme_is_kept_and_no_page_is_wider_than_a_phone(api: Running, page: Any) -> None:
    jobs = await fill(api.service.store, None, api.service.clock.now())
    await page.get_by_role("button", name="dark").click()
    await page.set_viewport_size({"width": 360, "height": 800})
    for path in (
        "/ui/jobs",
        "/ui/new",
        "/ui/offers?accelerator=l40s",
        "/ui/spend/invoice",
        "/ui/team/secrets",
        "/ui/team/policies",
        "/ui/team/approvals",
        "/ui/estimate?model=mistralai/Mistral-7B-v0.1&rows=1000&usd_per_gpu_hour=2",
        f"/ui/compare?jobs={jobs['live']},{jobs['over']}",
        f"/ui/jobs/{jobs['live']}",
        f"/ui/jobs/{jobs['over']}/decision",
    ):
        await page.goto(api.url + path)
        assert await page.locator("html").get_attribute("data-theme") == "dark"
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360, path


async def test_ticked_runs_stay_ticked_and_are_compared(api: Running, page: Any) -> None:
    """The refresh of the list keeps the ticks; each plot of the comparison has a curve for each run."""
    jobs = await fill(api.service.store, None, api.service.clock.now())
    for job in jobs.values():
        await saved(api, job, 20)
    await page.goto(f"{api.url}/ui/jobs")
    for job in jobs.values():
        await page.locator(f"#tick-{job}").check()
    async with page.expect_response("**/ui/jobs?*part=table*"):
        pass
    assert await page.locator("input[name=job]:checked").count() == 2
    await page.get_by_role("button", name="Compare", exact=True).click()
    await page.locator("canvas").nth(2).wait_for()
    assert await page.locator(".u-legend .u-label").filter(has_text="devils-dictionary").count() == 6


async def test_an_estimate_is_made_and_drawn_from_the_form(api: Running, page: Any) -> None:
    await page.get_by_role("link", name="Estimate", exact=True).click()
    await page.locator("#f-model").fill(MODEL)
    await page.locator("#f-model").press("Enter")
    await page.locator("canvas").first.wait_for()
    assert await page.locator("svg.memory").count() == 10


async def test_a_secret_is_set_and_deleted_by_keyboard(api: Running, page: Any) -> None:
    await page.goto(api.url + "/ui/team/secrets")
    await page.locator("#name").focus()
    for key in ("HF_TOKEN", "Tab", "very-secret", "Enter"):
        await (page.keyboard.press(key) if key in ("Tab", "Enter") else page.keyboard.type(key))
    await page.get_by_role("link", name="Delete HF_TOKEN").focus()
    await page.keyboard.press("Enter")
    await page.get_by_role("button", name="Delete HF_TOKEN").focus()
    await page.keyboard.press("Enter")
    await page.get_by_text("No secrets yet").wait_for()

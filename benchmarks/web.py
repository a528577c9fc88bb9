"""Figures of the web pages: `python -m benchmarks.web`, or `--quick` within two minutes. The last line is JSON.

The application on a socket, with embedded PostgreSQL; browser and clients share its host, the clients also its process.
`page_p99_ms` is that of the slowest page, `live_quote_p99_ms` of a quote while typing. `plot_10k_ms` is the time from
the first plot's creation to its frame in Chromium, for two curves of 10,000 points. `stream_mib` is the growth of the
process for all streams, clients included. A figure that cannot be measured is null, and an earlier line says why.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.quote import PROVIDERS, market
from benchmarks.quote_api import Clouds, percentile
from broker.api.service.interfaces import Settings
from broker.daemon.app import calm_garbage_collector
from broker.domain.ids import job_id
from broker.domain.offer import ProviderStatus
from broker.store.embedded.server import EmbeddedPostgres
from broker.store.migrate import migrate
from broker.store.postgres.store import PostgresStore
from tests.api.harness import CSV, MODEL, Running, memory_blobs, serving
from tests.conformance.samples import make_job
from tests.web.screenshots import CHROMIUM
from tests.web.seed import fill, spec
from tests.web.test_metrics import saved
from tests.web.visitor import Visitor

AXE = "axe-core@4.14.1"
"""Accessibility checker (MPL-2.0), which `npm pack` fetches into a temporary folder for this run."""
POINTS = 10_000
RICH = 10
"""Times that jobs in five states are stored, so that the first page of the list has attempts, spending and receipts."""
AT_ONCE = 32
STREAMS_OF_TOKEN = 90
OPEN_S = 60.0
SERIOUS = ("serious", "critical")
TIMING = """
let first = 0, made;
Object.defineProperty(window, "uPlot", {
  configurable: true,
  get: () => made,
  set: (Plot) => { made = new Proxy(Plot, { construct(target, args) {
    first = first || performance.now();
    requestAnimationFrame(() => { document.documentElement.dataset.plotMs = performance.now() - first; });
    return new target(...args);
  } }); },
});
"""
"""Script of the browser that times the plots of a page."""


class ListedClouds(Clouds):
    """Clouds whose status names the same providers as their capabilities."""

    def status(self) -> list[ProviderStatus]:
        return [ProviderStatus(name=name, seen_at=datetime.now(UTC)) for name in PROVIDERS]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Amounts of one measurement."""

    jobs: int
    offers: int
    requests: int
    quotes: int
    streams: int


FULL = Sizes(jobs=10_000, offers=5_000, requests=100, quotes=200, streams=200)
QUICK = Sizes(jobs=500, offers=1_000, requests=10, quotes=20, streams=50)


async def seed(api: Running, jobs: int) -> dict[str, str]:
    """Store queued jobs of yesterday, and newer ones in every state; return two of these."""
    store, now = api.service.store, datetime.now(UTC)
    wanted = spec("queued", "5.00", {"sweep": "a"})
    for first in range(0, jobs, AT_ONCE):
        batch = (
            make_job(
                id=job_id(os.urandom(9)), owner="ada", spec=wanted, created_at=now - timedelta(days=1, seconds=number)
            )
            for number in range(first, min(first + AT_ONCE, jobs))
        )
        await asyncio.gather(*(store.submit(job, key=None, body_sha256="", events=()) for job in batch))
    for _ in range(RICH):
        rich = await fill(store, None, now)
    await saved(api, rich["live"], 2000)
    return rich


def pages(rich: Mapping[str, str]) -> list[str]:
    run = f"/ui/jobs/{rich['live']}"
    return [
        "/ui/jobs", "/ui/jobs?state=active", "/ui/jobs?label=team%3Anlp", "/ui/jobs?owner=grace", "/ui/new",
        "/ui/offers", "/ui/spend?by=gpu", "/ui/spend/calibration", "/ui/compare", run,
        f"/ui/compare?jobs={rich['live']},{rich['over']}",
        f"/ui/jobs/{rich['over']}", f"{run}/events", f"{run}/decision", f"{run}/logs", f"{run}/spec",
        f"{run}/metrics.json", "/ui/team/tokens", "/ui/team/secrets", "/ui/team/channels", "/ui/team/policies",
        "/ui/team/approvals", "/ui/team/audit", "/ui/system", "/ui/estimate",
        "/ui/estimate?model=mistralai/Mistral-7B-v0.1&method=full&rows=100000&usd_per_gpu_hour=2.10",
    ]  # fmt: skip


async def page_times(visitor: Visitor, paths: list[str], requests: int) -> tuple[float, float]:
    """Return the highest p50 and p99 of all pages in milliseconds."""
    highest = (0.0, 0.0)
    for path in paths:
        times = []
        for _ in range(requests):
            start = time.perf_counter()
            answer = await visitor.get(path)
            times.append(1000 * (time.perf_counter() - start))
            assert answer.status == 200, (path, answer.status)
        middle, most = percentile(times, 0.5), percentile(times, 0.99)
        print(f"{path}: p50 {middle} ms, p99 {most} ms")
        highest = (max(highest[0], middle), max(highest[1], most))
    return highest


async def quote_times(visitor: Visitor, quotes: int) -> float:
    """Return the p99 of a quote while typing in milliseconds."""
    upload = (await visitor.upload("/ui/new/upload", "words.csv", CSV.encode())).location.partition("upload=")[2]
    form = {"upload": upload, "key": "k", "task": "causal_lm", "name": "words", "model": MODEL, "cap_usd": "400",
            "prompt": "Define {word}:", "completion": "{definition}", "method": "lora", "gpus": "auto"}  # fmt: skip
    times = []
    for number in range(quotes + 3):
        start = time.perf_counter()
        answer = await visitor.htmx("/ui/new/quote", **form, max_steps=str(1000 + number))
        times.append(1000 * (time.perf_counter() - start))
        assert answer.status == 200
        assert "best" in answer.text.lower(), answer.text[:2000]
    return percentile(times[3:], 0.99)


async def first_page_kb(api: Running, cookies: Mapping[str, str]) -> float:
    """Return gzipped kilobytes of the list of jobs with every file that it loads."""
    headers = {"Accept-Encoding": "gzip", "Sec-Fetch-Site": "none"}
    async with aiohttp.ClientSession(api.url, cookies=cookies, auto_decompress=False) as raw, aiohttp.ClientSession(
        api.url, cookies=cookies
    ) as plain:  # fmt: skip
        async with plain.get("/ui/jobs", headers=headers) as answer:
            links = re.findall(r'(?:src|href)="(/ui/static/[^"]+)"', await answer.text())
        total = 0
        for path in ("/ui/jobs", *dict.fromkeys(links)):
            async with raw.get(path, headers=headers) as answer:
                assert answer.headers.get("Content-Encoding") == "gzip", path
                total += len(await answer.read())
    return round(total / 1000, 1)


# ---------------------------------------------------------------------------------------------------------- the browser


def axe_script() -> str | None:
    """Return axe-core's script; None if it cannot be fetched."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run(["npm", "pack", AXE], cwd=folder, check=True, capture_output=True, timeout=120)
            with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
                file = archive.extractfile("package/axe.min.js")
                return None if file is None else file.read().decode()
        except (OSError, subprocess.SubprocessError, StopIteration, KeyError) as error:
            print(f"axe_serious is null: {AXE} cannot be fetched by npm: {error}")
            return None


async def seen_by_browser(api: Running, headers: Mapping[str, str], rich: Mapping[str, str]) -> dict[str, Any]:
    """Return time of the plot, violations of the policy, and serious findings of axe-core."""
    if not Path(CHROMIUM).exists():
        print(f"plot_10k_ms, csp_violations and axe_serious are null: no {CHROMIUM}; run `make browser`")
        return dict.fromkeys(("plot_10k_ms", "csp_violations", "axe_serious"))
    from playwright.async_api import async_playwright

    quoted = f"/ui/new?upload={(await api.upload(headers))['ref']}&model={MODEL}&cap_usd=400"
    axe, violations, serious = await asyncio.to_thread(axe_script), [], set()
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for theme, width in (("light", 1440), ("dark", 360)):
            context = await browser.new_context(viewport={"width": width, "height": 900})
            await context.add_cookies([{"name": "gpubroker-theme", "value": theme, "url": api.url}])
            page = await context.new_page()
            page.on("console", lambda m: violations.append(m.text) if "Content Security Policy" in m.text else None)
            link = await api.call("POST", "/v1/me/sign-in-links", headers, 201)
            for path in (link["path"], quoted, *(path for path in pages(rich) if ".json" not in path)):
                await page.goto(api.url + path)
                if path == quoted:
                    await page.locator(".sentence").wait_for()
                if axe is not None:
                    serious |= {(path, rule) for rule in await _serious(page, axe)}
            plot_ms = await _plot_ms(context, api.url + f"/ui/jobs/{rich['live']}")
            await context.close()
        await browser.close()
    for line in (*violations, *sorted(serious)):
        print("finding:", line)
    findings = None if axe is None else len(serious)
    return {"plot_10k_ms": plot_ms, "csp_violations": len(violations), "axe_serious": findings}


async def _serious(page: Any, axe: str) -> list[str]:
    await page.evaluate(axe)
    found = await page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{rule['id']}: {rule['nodes'][0]['html'][:100]}" for rule in found["violations"] if rule["impact"] in SERIOUS
    ]


async def _plot_ms(context: Any, url: str) -> float:
    """Return milliseconds of the plots of a run with POINTS points."""
    steps = list(range(1, POINTS + 1))
    body = {"step": steps, "loss": [4.9 / n**0.07 for n in steps], "tokens_per_s": [812.0 + n % 40 for n in steps],
            "interruptions": [{"step": 5000, "reason": "preempted"}], "skipped_bytes": 0, "total": POINTS}  # fmt: skip
    page = await context.new_page()
    await page.add_init_script(TIMING)
    await page.route("**/metrics.json", lambda route: route.fulfill(json=body))
    times = []
    for _ in range(5):
        await page.goto(url)
        await page.locator("canvas").nth(1).wait_for()
        await page.locator("html[data-plot-ms]").wait_for()
        times.append(float(await page.locator("html").get_attribute("data-plot-ms")))
    return round(sorted(times)[2], 1)


# ---------------------------------------------------------------------------------------------------------- the streams


async def open_streams(api: Running, job: str, count: int) -> dict[str, Any]:
    """Return the number of streams of a run that are open at once, and the memory they take."""
    writers, process = [], psutil.Process()
    cookies = [await _cookie(api, f"viewer{n}") for n in range(-(-count // STREAMS_OF_TOKEN))]
    before, host = process.memory_info().rss, api.url.removeprefix("http://")
    try:
        async with asyncio.timeout(OPEN_S):
            for number, cookie in zip(range(count), _repeated(cookies), strict=False):
                reader, writer = await asyncio.open_connection(*host.split(":"))
                writers.append(writer)
                head = f"GET /ui/jobs/{job}/stream HTTP/1.1\r\nHost: {host}\r\nCookie: {cookie}\r\n\r\n"
                writer.write(head.encode())
                status = (await reader.readline()).decode()
                assert " 200 " in status, (number, status)
        await asyncio.sleep(5)
        grown = (process.memory_info().rss - before) / 1024**2
        async with Visitor(api) as visitor:
            await visitor.sign_in(await api.token("ada"))
            assert (await visitor.get("/ui/jobs")).status == 200
        return {"streams": len(writers), "stream_mib": round(grown, 1)}
    finally:
        for writer in writers:
            writer.close()


def _repeated(cookies: list[str]) -> Iterator[str]:
    for cookie in cookies:
        yield from [cookie] * STREAMS_OF_TOKEN


async def _cookie(api: Running, owner: str) -> str:
    async with Visitor(api) as visitor:
        await visitor.sign_in(await api.token(owner))
        return "; ".join(f"{name}={value}" for name, value in visitor.cookies.items())


async def measure(dsn: str, sizes: Sizes, spool: Path) -> dict[str, Any]:
    store = await PostgresStore.connect(dsn)
    try:
        async with serving(store, memory_blobs(), settings=Settings(spool=spool)) as api, Visitor(api) as visitor:
            api.service.quotes.market = ListedClouds(items=market(sizes.offers, datetime.now(UTC)))
            rich = await seed(api, sizes.jobs)
            streams = await open_streams(api, rich["live"], sizes.streams)
            calm_garbage_collector()
            headers = await api.token("ada", "read", "submit", "manage", "admin")
            await visitor.sign_in(headers)
            middle, most = await page_times(visitor, pages(rich), sizes.requests)
            result = {"first_page_kb_gz": await first_page_kb(api, visitor.cookies), "page_p50_ms": middle}
            result |= {"page_p99_ms": most, "live_quote_p99_ms": await quote_times(visitor, sizes.quotes)}
            return result | await seen_by_browser(api, headers, rich) | streams
    finally:
        await store.close()


async def run(sizes: Sizes) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        async with await EmbeddedPostgres.start(Path(folder) / "state", durable=True) as server:
            await migrate(server.dsn)
            return await measure(server.dsn, sizes, Path(folder) / "spool")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small amounts")
    for name in ("jobs", "offers", "requests", "quotes", "streams"):
        parser.add_argument(f"--{name}", type=int)
    args = vars(parser.parse_args())
    sizes = QUICK if args.pop("quick") else FULL
    amounts = {name: getattr(sizes, name) if given is None else given for name, given in args.items()}
    print(json.dumps(amounts | {"load": round(os.getloadavg()[0], 1)}))
    print(json.dumps(asyncio.run(run(Sizes(**amounts)))))


if __name__ == "__main__":
    main()

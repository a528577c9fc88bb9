"""Draw the pages into docs/img: `make screenshots`. Chromium draws them from seeded jobs, in both themes and widths."""

import asyncio
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from PIL import Image

from tests.api.harness import memory_blobs, serving
from tests.conformance.samples import ManualClock
from tests.support.memory_store.store import MemoryStore
from tests.web.seed import fill
from tests.web.test_metrics import saved

CHROMIUM = "/usr/bin/chromium"
WIDTHS = {"wide": (1440, 1000), "narrow": (360, 800)}


def pages(jobs: Mapping[str, str], data: str) -> dict[str, str]:
    new = f"/ui/new?upload={data}&model=HuggingFaceTB/SmolLM2-135M&cap_usd=5&deadline=2026-03-01T14:00:00Z"
    return {
        "new": new,
        "offers": "/ui/offers",
        "spend": "/ui/spend?by=gpu",
        "calibration": "/ui/spend/calibration",
        "jobs": "/ui/jobs",
        "run": f"/ui/jobs/{jobs['live']}",
        "receipt": f"/ui/jobs/{jobs['over']}",
        "compare": f"/ui/compare?jobs={jobs['over']},{jobs['live']}",
        "estimate": "/ui/estimate?model=mistralai/Mistral-7B-v0.1&method=full&rows=100000&usd_per_gpu_hour=2.10",
        "decision": f"/ui/jobs/{jobs['live']}/decision",
        "team": "/ui/team/tokens",
    }


def small(picture: bytes) -> bytes:
    """Return a PNG with a palette of 96 colours, a third of the bytes."""
    out = io.BytesIO()
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(96, dither=Image.Dither.NONE).save(
        out, "PNG", optimize=True
    )
    return out.getvalue()


async def draw(folder: Path, only: str = "") -> None:
    from playwright.async_api import async_playwright

    clock = ManualClock()
    store = MemoryStore(clock)
    async with serving(store, memory_blobs(), clock=clock) as api, async_playwright() as driver:
        jobs = await fill(store, clock, clock.now())
        for place, job in enumerate(jobs.values()):
            await saved(api, job, 300, fall=0.07 + place / 50)
        data = await api.upload(await api.token("ada"))
        me = await api.token("ada", "read", "submit", "manage")
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width, (x, y) in WIDTHS.items():
            context = await browser.new_context(viewport={"width": x, "height": y})
            for theme in ("light", "dark"):
                await context.add_cookies([{"name": "gpubroker-theme", "value": theme, "url": api.url}])
                page = await context.new_page()
                page.on("console", lambda message: print("console:", message.text, file=sys.stderr))
                if theme == "light":
                    code = await api.call("POST", "/v1/me/sign-in-links", me, 201)
                    await page.goto(api.url + code["path"])
                for name, path in pages(jobs, data["ref"]).items():
                    if only in name:
                        await page.goto(api.url + path)
                        if name == "new":
                            await page.locator(".sentence").wait_for()
                        if name in ("run", "receipt", "compare", "estimate"):
                            await page.locator("canvas").first.wait_for()
                        (folder / f"web-{name}-{width}-{theme}.png").write_bytes(small(await page.screenshot()))
                        assert urlsplit(page.url).path == urlsplit(path).path
                await page.close()
            await context.close()
        await browser.close()


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/img")
    target.mkdir(exist_ok=True)
    asyncio.run(draw(target, sys.argv[2] if len(sys.argv) > 2 else ""))

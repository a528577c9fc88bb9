"""Hostile texts, other teams, other sites, and what the pages allow a browser to load."""

import hashlib
import re
from pathlib import Path

import pytest

from broker.web.rendering import POLICY
from broker.web.static_files import static_files, static_url
from tests.api.harness import Running, spec
from tests.web.visitor import Visitor

HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m\u202e"
WEB = Path("broker/web")
TEMPLATES = sorted((WEB / "templates").glob("*.html"))
VENDOR = {
    "LICENSE-htmx-sse.txt": "a17d224ce9afdc21ec9491b76a2f5d036d19aa641ac4f85ca29c21f9f7e54fdf",
    "LICENSE-htmx.txt": "d3d2456f76414f2456104660ebd65aff1c04cd7966b942bdabd63f3cdb316a38",
    "LICENSE-uPlot.txt": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    "htmx-sse.min.js": "98a46496de0c3605fbffdce9167ba427bdd9553184f83f149c261891a92c0136",
    "htmx.min.js": "d6fdc75f204e6bdefa99b69bf1e6d4ac69b8a364f77929f45c13476b4000f717",
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""Files of htmx 2.0.11, htmx-ext-sse 2.2.4 and uPlot 1.6.32, as npm publishes them."""
PAGES = ("", "/events", "/decision", "/logs", "/spec")


async def submitted(api: Running, owner: str = "ada", team: str = "default", **changes: object) -> str:
    token = await api.token(owner, team=team)
    ref = (await api.upload(token))["ref"]
    job = await api.call("POST", "/v1/jobs", token, 202, json=spec(ref, **changes))
    return str(job["id"])


async def test_hostile_texts_are_escaped_on_every_page(api: Running, ada: Visitor) -> None:
    data = {"path": (await api.upload(await api.token("ada")))["ref"], "completion": "{definition}", "prompt": HOSTILE}
    job = await submitted(api, labels={"note": HOSTILE}, train={"model": "HuggingFaceTB/SmolLM2-135M", "data": data})
    for path in ["/ui/jobs", *(f"/ui/jobs/{job}{page}" for page in PAGES)]:
        page = await ada.get(path)
        assert page.status == 200, path
        assert "<script>alert" not in page.text, path
        assert "\x1b" not in page.text, path
        assert "\u202e" not in page.text, path
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in (await ada.get("/ui/jobs")).text
    reflected = await ada.get("/ui/jobs?owner=%22%3E%3Cscript%3Ealert(1)%3C/script%3E")
    assert reflected.status == 422
    assert "<script>alert" not in reflected.text


async def test_a_job_of_another_team_does_not_exist(api: Running, ada: Visitor) -> None:
    job = await submitted(api, "bob", "other")
    for page in [*PAGES, "/logs.txt", "/stream"]:
        theirs = await ada.get(f"/ui/jobs/{job}{page}")
        none = await ada.get(f"/ui/jobs/{'a' * 13}{page}")
        assert theirs.status == none.status == 404, page
        assert theirs.text.replace(job, "") == none.text.replace("a" * 13, ""), page
    for action in ("cancel", "cap", "retry"):
        assert (await ada.post(f"/ui/jobs/{job}/{action}", cap_usd="9")).status == 404, action


FOREIGN: list[dict[str, str]] = [
    {},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "none"},
    {"Origin": "null"},
    {"Origin": "https://evil.example"},
    {"Sec-Fetch-Site": "cross-site", "Origin": "http://{host}"},
]


async def test_a_write_from_another_site_is_refused(api: Running, ada: Visitor) -> None:
    job = await submitted(api)
    host = api.url.removeprefix("http://")
    for headers in FOREIGN:
        sent = {name: value.format(host=host) for name, value in headers.items()}
        for path in (f"/ui/jobs/{job}/cancel", "/ui/sign-out", "/ui/theme", "/ui/sign-in"):
            assert (await ada.post(path, sent)).status == 403, (path, sent)
    assert (await ada.get("/ui/jobs")).status == 200
    assert (await ada.post("/ui/theme", {"Origin": api.url}, theme="dark")).status == 303


async def test_the_api_takes_no_cookie(api: Running, ada: Visitor) -> None:
    """Otherwise every page of another site could call the API as the user."""
    assert (await ada.get("/v1/jobs")).status == 401


async def test_a_token_that_may_only_read_changes_nothing(api: Running) -> None:
    job = await submitted(api)
    async with Visitor(api) as reader:
        await reader.sign_in(await api.token("eve", "read"))
        page = await reader.get(f"/ui/jobs/{job}")
        assert "Cancel this job" not in page.text
        refused = await reader.post(f"/ui/jobs/{job}/cancel")
        assert refused.status == 403
        assert "lacks the scope" in refused.text


async def test_browsers_guess_no_type_of_a_file(ada: Visitor) -> None:
    for path in ("/ui/static/app.css", "/openapi.json", "/healthz", "/v1/schema/job", "/v1/nothing"):
        assert (await ada.get(path)).headers["X-Content-Type-Options"] == "nosniff"


async def test_every_answer_has_the_policy(ada: Visitor) -> None:
    for path in ("/ui/sign-in", "/ui/jobs", "/ui/nothing", "/ui/jobs/nothing", "/ui/static/nothing.js"):
        headers = (await ada.get(path)).headers
        assert headers["Content-Security-Policy"] == POLICY
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"


def test_the_policy_allows_nothing_inline_and_no_other_host() -> None:
    assert POLICY.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
    assert "unsafe" not in POLICY
    assert "http" not in POLICY


FORBIDDEN = re.compile(
    r"""\son[a-z]+\s*=|hx-on|hx-vals\s*=\s*["']js:|javascript:|\bjs:|\sstyle\s*=|<style|<script(?![^>]*\ssrc=)|\|\s*safe\b"""
    r"""|autoescape\s+false|(?:src|href)="(?:https?:)?//""",
    re.IGNORECASE,
)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_templates_hold_no_inline_code_style_or_raw_text(template: Path) -> None:
    assert FORBIDDEN.findall(template.read_text()) == []


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_the_keyboard_reaches_scrolling_elements(template: Path) -> None:
    assert re.findall(r'<\w+ class="(?:scroll|log)"(?![^>]*tabindex)', template.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        '<a onclick="x()">',
        "<a hx-on:click='x'>",
        '<b style="x">',
        "<script>1</script>",
        "{{ x | safe }}",
        'src="//cdn"',
    ],
)
def test_the_lint_of_templates_finds(text: str) -> None:
    assert FORBIDDEN.search(text)


def test_vendored_files_equal_the_published_ones() -> None:
    files = sorted((WEB / "static" / "vendor").iterdir())
    assert {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files} == VENDOR


async def test_static_files_are_compressed_and_kept(ada: Visitor) -> None:
    for name in static_files():
        answer = await ada.get(static_url(name))
        assert answer.status == 200
        assert "immutable" in answer.headers["Cache-Control"]
        assert answer.headers["Content-Encoding"] == "gzip"


def test_the_first_page_loads_few_bytes() -> None:
    """The first page has 70 kB, gzipped, with the markup. Only pages with a plot load the plot's script."""
    first = [file for name, file in static_files().items() if "uPlot" not in name]
    assert sum(len(file.compressed) for file in first) < 40_000
    assert len(static_files()["app.css"].compressed) < 12_000


def test_own_javascript_is_little() -> None:
    lines = [line for file in (WEB / "static").glob("*.js") for line in file.read_text().splitlines()]
    assert len(lines) <= 300

"""`gpubroker web`."""

import re
import webbrowser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from broker.cli.commands import web
from broker.client.async_client import AsyncClient
from tests.api.harness import Running
from tests.web.visitor import Visitor


async def test_the_printed_link_signs_in(api: Running) -> None:
    token = (await api.token("ada"))["Authorization"].removeprefix("Bearer ")
    async with AsyncClient(api.url, token) as client:
        link = await web.link(client)
    async with Visitor(api) as visitor:
        assert (await visitor.get(link.removeprefix(api.url))).location == "/ui/jobs"
        assert "ada" in (await visitor.get("/ui/jobs")).text


async def test_a_daemon_on_another_machine_is_opened_without_a_code() -> None:
    async with AsyncClient("https://gpu.example", "") as client:
        assert await web.link(client) == "https://gpu.example/ui"


def test_the_code_is_not_among_the_arguments_of_the_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setenv("GPUBROKER_HOME", str(tmp_path))

    def record(url: str) -> bool:
        opened.append(url)
        return True

    monkeypatch.setattr(webbrowser, "open", record)
    url = "http://127.0.0.1:7070/ui/sign-in?code=abc"
    assert web._opened(url)
    assert "abc" not in opened[0]
    file = Path(urlsplit(opened[0]).path)
    assert file.stat().st_mode & 0o077 == 0
    assert re.findall(r'href="([^"]+)"', file.read_text()) == [url]

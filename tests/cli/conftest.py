"""The command line against the real application over the memory store, in its own home."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from broker.cli.main import app
from broker.runtime.clock import SystemClock
from tests.api.harness import Running, memory_blobs, serving
from tests.support.memory_store.store import MemoryStore

GOOD = """\
name: cynic
cap_usd: 5
train:
  model: HuggingFaceTB/SmolLM2-135M
  data:
    path: words.csv
    prompt: "Define {word}:"
    completion: "{definition}"
"""
WORDS = "word,definition\n" + "".join(f"word{i},what word {i} means to a cynic\n" for i in range(40))


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Parse stdout as one JSON document."""
        return json.loads(self.out)


def invoke(*words: str, stdin: str | bytes | None = None) -> Ran:
    result = CliRunner().invoke(app, list(words), input=stdin, catch_exceptions=False)
    return Ran(code=result.exit_code, out=result.stdout, err=result.stderr)


@dataclass(frozen=True, kw_only=True)
class Shell:
    """Shell that runs commands against `api`. Commands block, so call `run` in a thread."""

    api: Running
    folder: Path

    def run(self, *words: str, stdin: str | bytes | None = None) -> Ran:
        return invoke(*words, stdin=stdin)

    def spec(self, text: str = GOOD, words: str | bytes | None = WORDS) -> str:
        """Write a spec file with its data next to it, and return the spec's path."""
        if words is not None:
            (self.folder / "words.csv").write_bytes(words if isinstance(words, bytes) else words.encode())
        path = self.folder / "job.yaml"
        path.write_text(text)
        return str(path)


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hide the daemon and the login of this machine's user."""
    for name in ("GPUBROKER_URL", "GPUBROKER_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GPUBROKER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


@pytest.fixture
async def api(own_home: Path) -> AsyncIterator[Running]:
    store = MemoryStore(SystemClock())
    async with serving(store, memory_blobs()) as running:
        yield running
    await store.close()


@pytest.fixture
async def shell(api: Running, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    headers = await api.token("ada", "read", "submit", "admin")
    monkeypatch.setenv("GPUBROKER_URL", api.url)
    monkeypatch.setenv("GPUBROKER_TOKEN", headers["Authorization"].removeprefix("Bearer "))
    return Shell(api=api, folder=own_home)

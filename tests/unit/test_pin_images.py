"""`make pins` over a loopback registry that speaks the distribution API."""

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

MANIFEST = json.dumps({"schemaVersion": 2, "manifests": []}).encode()
DIGEST = f"sha256:{hashlib.sha256(MANIFEST).hexdigest()}"


class Registry(BaseHTTPRequestHandler):
    """Registry with one image, for callers with an anonymous token."""

    reported = DIGEST

    def do_GET(self) -> None:
        host = self.headers["Host"]
        if self.path.startswith("/token?"):
            self._answer(200, b'{"token": "anonymous"}')
        elif self.headers.get("Authorization") != "Bearer anonymous":
            realm = f'Bearer realm="http://{host}/token",service="s",scope="repository:library/python:pull"'
            self._answer(401, b"{}", **{"WWW-Authenticate": realm})
        elif self.path == "/v2/library/python/manifests/3.11.15-slim":
            self._answer(200, MANIFEST, **{"Docker-Content-Digest": self.reported})
        else:
            self._answer(404, b"{}")

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def pin(*words: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, ".ci/pin_images.py", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_tags_get_the_digest_of_the_registry(registry: str, tmp_path: Path) -> None:
    file, image = tmp_path / "Containerfile.x", f"{registry}/library/python:3.11.15-slim"
    old = f"{image}@sha256:{'0' * 64}"
    file.write_text(f"# a comment\nFROM {old} AS build\nRUN true\nFROM {image}\n    image: {image} # why\n")
    assert pin(file).returncode == 0
    new = f"{image}@{DIGEST}"
    assert file.read_text() == f"# a comment\nFROM {new} AS build\nRUN true\nFROM {new}\n    image: {new} # why\n"
    assert pin("--check", file).returncode == 0


def test_an_absent_tag_or_a_false_digest_changes_nothing(
    registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "Containerfile.x"
    monkeypatch.setattr(Registry, "reported", f"sha256:{'1' * 64}")
    for tag, reason in (("9.9", "404"), ("3.11.15-slim", "the registry reports")):
        text = f"FROM {registry}/library/python:{tag}\n"
        file.write_text(text)
        done = pin(file)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert reason in done.stderr
        assert file.read_text() == text


def test_the_check_names_loose_tags_and_damaged_digests(tmp_path: Path) -> None:
    file = tmp_path / "Containerfile.x"
    file.write_text("FROM docker.io/library/python:latest\nFROM docker.io/library/python:3.11.15@sha256:12\n")
    done = pin("--check", file)
    assert (done.returncode, done.stdout.count("\n")) == (1, 2)
    assert "name a full version" in done.stdout
    assert "run `make pins`" in done.stdout
    assert pin("--check").returncode == 0

"""The health check of a container: does the daemon of this home answer that it is ready?"""

import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.unit.broker.notify.tls import Authority

PATIENT = """
import runpy, urllib.request as urls
ask = urls.urlopen
urls.urlopen = lambda request, timeout, context: ask(request, timeout=300, context=context)
runpy.run_module("broker.daemon.healthcheck", run_name="__main__")
"""
"""`python -m broker.daemon.healthcheck`, whose answers may take as long as this machine does."""


class Answers(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/readyz" else 404)
        self.end_headers()
        self.wfile.write(
            b'{"title": "not ready", "problems": [{"field": "database"}]}' if self.status != 200 else b"{}"
        )

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(status: int, context: ssl.SSLContext | None = None) -> Iterator[int]:
    handler = type("Handler", (Answers,), {"status": status})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def check(home: Path, **content: object) -> tuple[int, str]:
    """Run the command with a client.json that holds `content`; return (exit code, output)."""
    if content:
        (home / "client.json").write_text(json.dumps({"token": "gb_secret", **content}))
    done = subprocess.run(
        [sys.executable, "-c", PATIENT], capture_output=True, text=True,
        env={**os.environ, "GPUBROKER_HOME": str(home)},
    )  # fmt: skip
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_a_ready_daemon_passes_the_health_check(tmp_path: Path) -> None:
    with serving(200) as port:
        assert check(tmp_path, url=f"http://127.0.0.1:{port}", certificate=None) == (0, "")


def test_a_daemon_that_is_not_ready_says_why(tmp_path: Path) -> None:
    with serving(503) as port:
        status, said = check(tmp_path, url=f"http://127.0.0.1:{port}", certificate=None)
    assert status == 1
    assert "database" in said


def test_a_daemon_with_a_certificate_of_its_own_for_another_name(tmp_path: Path) -> None:
    context = Authority(tmp_path).server("broker.example.com")
    with serving(200, context) as port:
        url = f"https://127.0.0.1:{port}"
        assert check(tmp_path, url=url, certificate=str(tmp_path / "broker.example.com.pem")) == (0, "")
        assert check(tmp_path, url=url, certificate=None)[0] == 1


def test_the_health_check_fails_without_a_daemon(tmp_path: Path) -> None:
    status, said = check(tmp_path)
    assert status == 1
    assert "client.json" in said
    with serving(200) as port:
        pass
    assert check(tmp_path, url=f"http://127.0.0.1:{port}", certificate=None)[0] == 1

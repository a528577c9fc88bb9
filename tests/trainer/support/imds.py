"""AWS's metadata service on loopback: tokens are asked for, a notice appears when the test says so."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Service:
    """Pages that the metadata service answers with, and the requests that it received."""

    def __init__(self) -> None:
        self.pages: dict[str, str] = {}
        self.asked: list[tuple[str, str]] = []
        self.token = "token-1"
        self.broken: int | None = None
        """Status of every answer, where it is not to work."""
        self.url = ""

    def notice(self, left_s: float) -> None:
        at = (datetime.now(UTC) + timedelta(seconds=left_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.pages["/latest/meta-data/spot/instance-action"] = f'{{"action": "terminate", "time": "{at}"}}'

    def answer(self, verb: str, path: str, headers: Any) -> tuple[int, str]:
        self.asked.append((verb, path))
        if self.broken is not None:
            return self.broken, ""
        if verb == "PUT" and path == "/latest/api/token":
            return (200, self.token) if headers["X-aws-ec2-metadata-token-ttl-seconds"] else (400, "")
        if headers["X-aws-ec2-metadata-token"] != self.token:
            return 401, ""
        return (200, self.pages[path]) if path in self.pages else (404, "")


@contextmanager
def serving() -> Iterator[Service]:
    service = Service()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = service.answer(self.command, self.path, self.headers)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_GET  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

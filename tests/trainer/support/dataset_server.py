"""A server on loopback with datasets as the Hub has them and objects as S3 and GCS have them.

It counts what was fetched.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_loopback_token_that_may_read"
KEY = "AKIALOOPBACK"
GATED, BUCKET, DATASET = "corp/gated", "bucket", "corp/words"
SHA = "a" * 40
Answer = tuple[int, dict[str, str], bytes]


@dataclass(kw_only=True)
class Shelves:
    """Contents of the server, by name in the dataset or the bucket."""

    files: dict[str, bytes] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)
    """Names of the contents that were sent."""
    url: str = ""

    def options(self, key: str = KEY) -> str:
        """Return S3 options in the form of a credential."""
        return json.dumps({"aws_endpoint": self.url, "aws_access_key_id": key, "aws_secret_access_key": "x",
                           "aws_region": "us-east-1"})  # fmt: skip

    def answer(self, method: str, target: str, authorization: str) -> Answer:
        parts = urlsplit(target)
        path, query = unquote(parts.path), parse_qs(parts.query)
        if path.startswith("/api/datasets/"):
            return self._dataset(path, authorization)
        if path.startswith(f"/datasets/{DATASET}/resolve/"):
            name = path.removeprefix(f"/datasets/{DATASET}/resolve/{SHA}/")
            return self._content(method, name, {"X-Repo-Commit": SHA})
        if path.strip("/").split("/")[0] == BUCKET:
            if KEY not in authorization:
                return 403, {}, b"<Error><Code>AccessDenied</Code></Error>"
            name = path.removeprefix(f"/{BUCKET}").strip("/")
            return self._content(method, name, {}) if name else self._listed(query.get("prefix", [""])[0])
        return 404, {}, b""

    def _dataset(self, path: str, authorization: str) -> Answer:
        if GATED in path:
            return 401 if not authorization else 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        if DATASET not in path or "/revision/gone" in path:
            code = "RevisionNotFound" if DATASET in path else "RepoNotFound"
            return 404, {"X-Error-Code": code}, b"{}"
        siblings = [{"rfilename": name} for name in self.files]
        return 200, {}, json.dumps({"id": DATASET, "sha": SHA, "siblings": siblings}).encode()

    def _content(self, method: str, name: str, headers: dict[str, str]) -> Answer:
        if name not in self.files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        if method == "GET":
            self.fetched.append(name)
        tag = hashlib.sha256(self.files[name]).hexdigest()
        return 200, {"ETag": f'"{tag}"', "Last-Modified": "Sun, 22 Nov 2026 10:00:00 GMT", **headers}, self.files[name]

    def _listed(self, prefix: str) -> Answer:
        met = "".join(
            f"<Contents><Key>{name}</Key><LastModified>2026-11-22T10:00:00.000Z</LastModified><Size>{len(content)}"
            f"</Size><ETag>\"{hashlib.sha256(content).hexdigest()}\"</ETag></Contents>"
            for name, content in self.files.items() if name.startswith(prefix)
        )  # fmt: skip
        text = f"<ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated>{met}</ListBucketResult>"
        return 200, {"Content-Type": "application/xml"}, text.encode()


@contextmanager
def served(shelves: Shelves) -> Iterator[None]:
    """Serve while the body runs."""

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            status, headers, body = shelves.answer(self.command, self.path, self.headers.get("Authorization", ""))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = _do  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    shelves.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()

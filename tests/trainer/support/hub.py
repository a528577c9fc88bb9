"""A server on loopback that speaks as much of the Hub's HTTP API as a push needs."""

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_loopback_token_that_may_write"


@dataclass(kw_only=True)
class Hub:
    """Repositories and files that the hub received."""

    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    """Committed contents by path in the repository."""
    refusals: int = 0
    """Number of the next answers that have the status 500."""
    url: str = ""
    _stored: dict[str, bytes] = field(default_factory=dict)

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, Any]:
        """Return (status, JSON)."""
        if path.startswith("/lfs/") and method == "PUT":
            oid = path.rsplit("/", 1)[1]
            assert hashlib.sha256(body).hexdigest() == oid
            self._stored[oid] = body
            return 200, {}
        if path == "/api/validate-yaml":  # of the model card
            return 200, {"errors": [], "warnings": []}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        if self.refusals:
            self.refusals -= 1
            return 400, {"error": "not now"}
        if (found := self._repository(method, path, body)) is not None:
            return found
        if "/preupload/" in path:
            asked = json.loads(body)["files"]
            large = {f["path"]: f["path"].endswith(".safetensors") for f in asked}
            modes = [
                {"path": p, "uploadMode": "lfs" if big else "regular", "shouldIgnore": False}
                for p, big in large.items()
            ]
            return 200, {"files": modes}
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            return 200, {"transfer": "basic", "objects": [
                {**o, "actions": {"upload": {"href": f"{self.url}/lfs/{o['oid']}"}}} for o in objects
            ]}  # fmt: skip
        if "/commit/" in path:
            for line in map(json.loads, body.decode().splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.files[value["path"]] = self._stored[value["oid"]]
            name = path.removeprefix("/api/models/").partition("/commit/")[0]
            return 200, {"success": True, "commitOid": "c" * 40, "commitUrl": f"{self.url}/{name}/commit/{'c' * 40}"}
        return 404, {"error": f"{method} {path}"}

    def _repository(self, method: str, path: str, body: bytes) -> tuple[int, Any] | None:
        if path == "/api/repos/create":
            document = json.loads(body)
            name = (
                f"{document['organization']}/{document['name']}" if document.get("organization") else document["name"]
            )
            if name in self.private:
                return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
            self.private[name] = document.get("private", document.get("visibility") == "private")
            return 200, {"url": f"{self.url}/{name}", "id": name, "name": name}
        name = path.removeprefix("/api/models/")
        return (200, {"id": name, "private": self.private[name]}) if method == "GET" and name in self.private else None


def serve(hub: Hub) -> ThreadingHTTPServer:
    """Return a started server; `hub.url` is its address."""

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, found = hub.answer(self.command, self.path, self.headers.get("Authorization", ""), body)
            data = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = _do  # noqa: N815

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server

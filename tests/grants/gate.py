"""S3 and STS on loopback: moto behind a gate that limits every key to the session policy of its issue.

moto evaluates no session policies. The gate forwards AssumeRole and GetFederationToken, and remembers the policy of the
key that moto makes. From then on it refuses calls that the policy does not allow, and every key that has ended. Like S3
it calls an absent object forbidden when the caller may not list the whole bucket.
"""

import json
import secrets
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, unquote

import aiohttp
from aiohttp import web
from moto.server import ThreadedMotoServer
from yarl import URL

from tests.grants.policy import allows

ROOT = "operator"
"""The access key of the daemon: IAM user or identity that may do everything."""
ROLE = "arn:aws:iam::123456789012:role/gpubroker-instance"
HOP = {"host", "connection", "transfer-encoding", "content-length", "content-encoding", "date", "server"}


@dataclass(kw_only=True)
class Session:
    policy: Mapping[str, Any]
    token: str
    expires: float
    """time.monotonic()"""
    asked: Mapping[str, str]


@dataclass(kw_only=True)
class Gate:
    """Gate in front of moto; it records the issued keys and the calls."""

    moto: str
    life_s: float
    """Lifetime of a key in seconds, as reported to callers of STS."""
    grace_s: float = 0.0
    """Seconds for which an ended key is still accepted, because a paused machine may renew it late."""
    bucket: str = ""
    """Bucket of this gate alone: all servers of moto in a process show the same S3."""
    url: str = ""
    sessions: dict[str, Session] = field(default_factory=dict)
    requests: int = 0
    denied: list[str] = field(default_factory=list)
    expired: int = 0
    absent: int = 0
    writes: dict[str, list[float]] = field(default_factory=dict)
    """time.monotonic() of each accepted PUT of an instance, by key."""
    used: set[str] = field(default_factory=set)
    """Keys of instances that were let through."""
    issues: bool = True
    """False: STS is down."""
    _client: aiohttp.ClientSession | None = None

    @property
    def place(self) -> str:
        return f"s3://{self.bucket}/team/runs"

    def options(self) -> dict[str, str]:
        """Return the store options of the daemon."""
        return {
            "aws_endpoint": self.url, "aws_region": "us-east-1", "aws_access_key_id": ROOT,
            "aws_secret_access_key": "hidden-from-instances",
        }  # fmt: skip

    async def fresh(self, life_s: float, grace_s: float = 0.0) -> None:
        """Delete everything and create a new bucket."""
        assert self._client is not None
        self.sessions, self.denied, self.writes, self.used, self.issues = {}, [], {}, set(), True
        self.requests = self.expired = self.absent = 0
        self.life_s, self.grace_s, self.bucket = life_s, grace_s, f"bucket-{secrets.token_hex(4)}"
        signed = {"Authorization": f"AWS4-HMAC-SHA256 Credential={ROOT}/20200101/us-east-1/s3/aws4_request"}
        async with self._client.put(f"{self.moto}/{self.bucket}", headers=signed) as made:
            assert made.status == 200

    async def handle(self, request: web.Request) -> web.Response:
        self.requests += 1
        body = await request.read()
        credential = request.headers.get("Authorization", "").partition("Credential=")[2]
        key = credential.partition("/")[0]
        if "/sts/" in credential.partition(",")[0]:
            return await self._issue(request, body, key)
        if key == ROOT or (request.method == "GET" and self._signed(request.query)):
            return await self._forward(request, body)
        session = self.sessions.get(key)
        if session is None or request.headers.get("x-amz-security-token") != session.token:
            return self._refuse(403, "InvalidAccessKeyId", f"{request.method} {request.rel_url}")
        if time.monotonic() >= session.expires + self.grace_s:
            self.expired += 1
            return _error(400, "ExpiredToken")
        for action, resource, context in _asks(request, body):
            if not allows(session.policy, action, resource, context):
                return self._refuse(403, "AccessDenied", f"{action} {resource} {dict(context)}")
        self.used.add(key)
        answer = await self._forward(request, body)
        if request.method == "PUT" and answer.status == 200:
            self.writes.setdefault(unquote(request.path), []).append(time.monotonic())
        if answer.status == 404 and not self._lists_everything(session, request):
            self.absent += 1
            return _error(403, "AccessDenied")
        return answer

    def _signed(self, query: Mapping[str, str]) -> bool:
        """Return True for a URL that the daemon signed. The signature is not checked, as in moto."""
        return query.get("X-Amz-Credential", "").startswith(f"{ROOT}/") and "X-Amz-Signature" in query

    def _lists_everything(self, session: Session, request: web.Request) -> bool:
        bucket = request.path.split("/")[1]
        return allows(session.policy, "s3:ListBucket", f"arn:aws:s3:::{bucket}", {})

    def _refuse(self, status: int, code: str, what: str) -> web.Response:
        self.denied.append(what)
        return _error(status, code)

    async def _forward(self, request: web.Request, body: bytes) -> web.Response:
        assert self._client is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
        target = URL(self.moto + request.raw_path, encoded=True)
        async with self._client.request(request.method, target, data=body, headers=headers) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP}
            data = await answer.read()
            if request.method == "HEAD":
                kept["Content-Length"] = answer.headers.get("Content-Length", "0")
            return web.Response(status=answer.status, body=data, headers=kept)

    async def _issue(self, request: web.Request, body: bytes, key: str) -> web.Response:
        asked = {name: values[0] for name, values in parse_qs(body.decode()).items()}
        if not self.issues:
            return _error(503, "ServiceUnavailable")
        assert key == ROOT
        assert asked["Action"] in ("AssumeRole", "GetFederationToken")
        assert len(asked["Policy"]) <= 2048
        assert 900 <= int(asked["DurationSeconds"]) <= 43_200
        answer = await self._forward(request, body)
        tree = ElementTree.fromstring(bytes(answer.body or b""))  # type: ignore[arg-type]
        found = {node.tag.rpartition("}")[2]: node for node in tree.iter()}
        access = str(found["AccessKeyId"].text)
        if asked["Action"] == "GetFederationToken":
            # moto gives everybody the same one.
            access = found["AccessKeyId"].text = f"{access}{len(self.sessions)}"
        self.sessions[access] = Session(
            policy=json.loads(asked["Policy"]), token=str(found["SessionToken"].text),
            expires=time.monotonic() + self.life_s, asked=asked,
        )  # fmt: skip
        ends = datetime.now(UTC) + timedelta(seconds=self.life_s)
        found["Expiration"].text = ends.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return web.Response(body=ElementTree.tostring(tree), content_type="text/xml")


def _asks(request: web.Request, body: bytes) -> list[tuple[str, str, dict[str, str]]]:
    """Return the permissions that a request needs, as S3 documents them: (action, resource, context)."""
    _, bucket, *rest = unquote(request.path).split("/", 2)
    arn, key, query = f"arn:aws:s3:::{bucket}", rest[0] if rest else "", request.query
    if not key:
        if request.method == "GET" and query.get("list-type") == "2":
            return [("s3:ListBucket", arn, {"s3:prefix": query["prefix"]} if "prefix" in query else {})]
        if request.method == "POST" and "delete" in query:
            names = [n.text or "" for n in ElementTree.fromstring(body).iter() if n.tag.rpartition("}")[2] == "Key"]
            return [("s3:DeleteObject", f"{arn}/{name}", {}) for name in names]
        return [(f"s3:unknown {request.method} {request.rel_url}", arn, {})]
    action = {"GET": "s3:GetObject", "HEAD": "s3:GetObject", "PUT": "s3:PutObject", "POST": "s3:PutObject"}.get(
        request.method, "s3:AbortMultipartUpload" if "uploadId" in query else "s3:DeleteObject"
    )
    asks: list[tuple[str, str, dict[str, str]]] = [(action, f"{arn}/{key}", {})]
    if source := request.headers.get("x-amz-copy-source"):
        asks.append(("s3:GetObject", f"arn:aws:s3:::{unquote(source).lstrip('/')}", {}))
    return asks


def _error(status: int, code: str) -> web.Response:
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>refused by the gate</Message></Error>"
    return web.Response(status=status, text=text, content_type="application/xml")


@asynccontextmanager
async def gated(life_s: float = 3600.0) -> AsyncIterator[Gate]:
    """Yield a gate with an empty bucket behind it."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    gate = Gate(moto=f"http://{host}:{port}", life_s=life_s)
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", gate.handle)
    runner = web.AppRunner(app, access_log=None)
    async with aiohttp.ClientSession(auto_decompress=False) as client:
        gate._client = client
        try:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            gate.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            await gate.fresh(life_s)
            yield gate
        finally:
            await runner.cleanup()
            moto.stop()

"""AWS for tests: moto behind a small server that answers what moto does not: prices, quotas and placement scores.

Answers are in the protocols of botocore's own models (EC2's XML, JSON 1.1), so botocore parses them as AWS's.
"""

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from moto.server import ThreadedMotoServer

_EC2 = "http://ec2.amazonaws.com/doc/2016-11-15/"
_REGION = re.compile(r"Credential=[^/]+/\d+/([a-z0-9-]+)/([a-z0-9-]+)/aws4_request")


IMAGE = "ami-0123456789abcdef0"


@contextmanager
def moto_server() -> Iterator[str]:
    """Run moto in a thread, and yield its URL. moto has no AMI here, because loading its hundreds takes seconds."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        try:
            yield f"http://{host}:{port}"
        finally:
            server.stop()


@dataclass
class Front:
    """Answers of AWS that moto lacks; tests change them."""

    moto: str
    on_demand: dict[tuple[str, str], str] = field(default_factory=dict)
    """Dollars by (instance type, region)."""
    spot: dict[tuple[str, str], str] = field(default_factory=dict)
    """Dollars by (instance type, zone)."""
    quotas: dict[str, float] = field(default_factory=dict)
    scores: dict[str, int] = field(default_factory=dict)
    """Placement scores by zone ID."""
    disk: dict[str, str] = field(default_factory=dict)
    """Dollars a GiB-month of gp3 by region."""
    groups: dict[str, list[str]] = field(default_factory=dict)
    """Placement groups, which moto does not know, by name: what runs in each."""
    failing: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    """(region, action) with `*` for any → HTTP status and error code."""
    rewritten: dict[str, str] = field(default_factory=dict)
    """Texts of moto's answers that are another one's, for states that it never shows."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """(region, action), in order."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        region = _REGION.search(request.headers.get("Authorization", ""))
        where = region[1] if region else ""
        form = {key: values[0] for key, values in parse_qs(body.decode(errors="replace")).items()}
        action = request.headers.get("X-Amz-Target", "").rpartition(".")[2] or form.get("Action", "")
        self.asked.append((where, action))
        for key in ((where, action), (where, "*"), ("*", action)):
            if key in self.failing:
                return _error(*self.failing[key], json_protocol="X-Amz-Target" in request.headers)
        match action:
            case "GetProducts":
                return self._products(json.loads(body))
            case "ListServiceQuotas":
                return _json({"Quotas": [{"QuotaName": n, "Value": v} for n, v in self.quotas.items()]})
            case "GetSpotPlacementScores":
                rows = [{"availabilityZoneId": zone, "score": str(score)} for zone, score in self.scores.items()]
                return _xml(action, "spotPlacementScoreSet", rows)
            case "DescribeSpotPriceHistory":
                return self._history(where, form)
            case "CreatePlacementGroup" | "DeletePlacementGroup" | "DescribePlacementGroups":
                return self._placement(action, form.get("GroupName", ""))
        return await self._forward(request, body, where)

    def _products(self, body: Any) -> web.Response:
        wanted = {one["Field"]: one["Value"] for one in body["Filters"]}
        listed: list[str] = []
        if kind := wanted.get("instanceType"):
            listed += [_product(region, usd) for (name, region), usd in self.on_demand.items() if name == kind]
        if wanted.get("volumeApiName") == "gp3":
            listed += [_product(region, usd) for region, usd in self.disk.items()]
        return _json({"PriceList": listed, "FormatVersion": "aws_v1"})

    def _history(self, region: str, form: dict[str, str]) -> web.Response:
        kinds = {value for key, value in form.items() if key.startswith("InstanceType.")}
        rows = [
            {
                "instanceType": kind, "availabilityZone": zone, "spotPrice": usd, "productDescription": "Linux/UNIX",
                "timestamp": "2026-01-01T00:00:00.000Z",
            }
            for (kind, zone), usd in self.spot.items()
            if kind in kinds and zone.startswith(region)
        ]  # fmt: skip
        return _xml("DescribeSpotPriceHistory", "spotPriceHistorySet", rows)

    def _placement(self, action: str, name: str) -> web.Response:
        """Return codes as the EC2 API reference lists them."""
        if action == "DescribePlacementGroups":
            return _xml(action, "placementGroupSet", [{"groupName": group} for group in self.groups])
        creates = action == "CreatePlacementGroup"
        if creates is (name in self.groups):
            return _error(400, f"InvalidPlacementGroup.{'Duplicate' if creates else 'Unknown'}", json_protocol=False)
        if creates:
            self.groups[name] = []
        elif self.groups[name]:
            return _error(400, "InvalidPlacementGroup.InUse", json_protocol=False)
        else:
            del self.groups[name]
        return _xml(action, "set", [])

    async def _forward(self, request: web.Request, body: bytes, region: str) -> web.Response:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length")}
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, self.moto + request.path_qs, data=body, headers=headers) as reply,
        ):
            text = await reply.text()
            for old, new in self.rewritten.items():
                text = text.replace(old, new)
            kind = reply.headers.get("Content-Type", "text/xml")
            return web.Response(status=reply.status, body=text.encode(), headers={"Content-Type": kind})


@asynccontextmanager
async def front(moto: str) -> AsyncIterator[tuple[Front, str]]:
    """Yield a front before moto, and its URL; moto starts empty."""
    async with aiohttp.ClientSession() as session:
        await session.post(f"{moto}/moto-api/reset")
    made = Front(moto=moto)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    async with TestServer(app, host="127.0.0.1") as server:
        yield made, str(server.make_url("")).rstrip("/")


def _product(region: str, usd: str) -> str:
    tier = {"unit": "Hrs", "beginRange": "0", "pricePerUnit": {"USD": usd}}
    terms = {"OnDemand": {"SKU.TERM": {"priceDimensions": {"SKU.TERM.RATE": tier}}}}
    return json.dumps({"product": {"attributes": {"regionCode": region}}, "terms": terms})


def _json(data: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, text=json.dumps(data), content_type="application/x-amz-json-1.1")


def _xml(action: str, items: str, rows: list[dict[str, str]]) -> web.Response:
    inner = "".join(f"<item>{''.join(f'<{k}>{escape(v)}</{k}>' for k, v in row.items())}</item>" for row in rows)
    text = f'<{action}Response xmlns="{_EC2}"><{items}>{inner}</{items}></{action}Response>'
    return web.Response(text=text, content_type="text/xml")


def _error(status: int, code: str, *, json_protocol: bool) -> web.Response:
    if json_protocol:
        return _json({"__type": code, "message": f"{code} it is"}, status)
    error = f"<Error><Code>{code}</Code><Message>{code} it is</Message></Error>"
    text = f"<Response><Errors>{error}</Errors><RequestID>r</RequestID></Response>"
    return web.Response(status=status, text=text, content_type="text/xml")

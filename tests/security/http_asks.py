"""Every operation of the OpenAPI document, with every parameter, as red: about its own, about blue's, about nobody's.

What the document takes and this file does not know raises Unplayed, so that a new operation cannot be forgotten.
"""

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from broker.api.http import APIS
from broker.api.openapi import document
from broker.domain.ids import base32, job_id
from tests.api.harness import spec
from tests.security.drivers import Unplayed
from tests.security.world import BLUE, PERSON, RED, World, data_set

Values = Sequence[tuple[str, Any]]
"""(what it is, the value): the first is part of the label, the second differs from world to world."""
LAST = ("cancel_job", "delete_token", "delete_secret", "delete_channel", "unlink_slack_user", "delete_policy")
"""They take away what others look at."""


@dataclass(frozen=True, kw_only=True)
class HttpAsk:
    label: str
    method: str
    path: str
    query: Sequence[tuple[str, str]] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    json: Any = None
    data: bytes | None = None


def http_asks(world: World) -> list[HttpAsk]:
    described = document(APIS, version="0")
    operations = [
        (method.upper(), path, operation)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    ]
    operations.sort(key=lambda one: (one[0] != "GET", one[2]["operationId"] in LAST))
    values = _Values(world)
    made = [ask for one in operations for ask in _of(world, values, *one)]
    made += _beside(world)
    twice = [label for label in {ask.label for ask in made} if sum(ask.label == label for ask in made) > 1]
    assert not twice, twice
    return made


@dataclass(frozen=True, kw_only=True)
class _Variation:
    """One parameter that is given."""

    what: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


def _of(world: World, values: "_Values", method: str, path: str, operation: Mapping[str, Any]) -> Iterator[HttpAsk]:
    """Every target with each of the bodies, then with each value of each parameter."""
    name, plain = operation["operationId"], _Variation()
    targets = list(_targets(values, path, operation))
    needed = {one["name"]: str(values.of(one["name"], operation)[0][1]) for one in _queries(operation, needed=True)}
    bodies = values.bodies(operation)
    turns = [(body, plain) for body in bodies] + [(bodies[0], one) for one in _variations(values, operation)]
    for (about, filled), ((what, body), variation) in itertools.product(targets, turns):
        raw = isinstance(body, bytes)
        kind = {"Content-Type": "application/octet-stream"} if raw else {}
        yield HttpAsk(
            label=f"{name}{about}{what}{variation.what}",
            method=method,
            path=filled,
            query=[*{**needed, **variation.query}.items()],
            headers={**world.own.headers, **variation.headers, **kind},
            json=None if raw else body,
            data=body if raw else None,
        )
    yield HttpAsk(label=f"{name} without a token", method=method, path=targets[0][1])


def _targets(values: "_Values", path: str, operation: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(what the path names, the path)."""
    names = [one["name"] for one in operation["parameters"] if one["in"] == "path"]
    for chosen in itertools.product(*(values.of(name, operation) for name in names)):
        about, filled = "", path
        for name, (what, value) in zip(names, chosen, strict=True):
            about, filled = f"{about} {name}={what}", filled.replace("{" + name + "}", str(value))
        yield about, filled


def _queries(operation: Mapping[str, Any], *, needed: bool) -> list[Mapping[str, Any]]:
    return [one for one in operation["parameters"] if one["in"] == "query" and bool(one.get("required")) >= needed]


def _variations(values: "_Values", operation: Mapping[str, Any]) -> Iterator[_Variation]:
    for one in operation["parameters"]:
        for what, value in values.of(one["name"], operation) if one["in"] != "path" else ():
            given = {one["name"]: str(value)}
            query, headers = (given, {}) if one["in"] == "query" else ({}, given)
            yield _Variation(what=f" {one['name']}={what}", query=query, headers=headers)


def _beside(world: World) -> list[HttpAsk]:
    """What is no operation: the shell, and addresses that do not exist."""
    sides = (("own", world.own), ("other", world.other))
    jobs = {f"{what} {name}": job for what, side in sides for name, job in side.jobs.items()}
    found = [
        HttpAsk(label=f"shell job_id={what}", method="GET", path=f"/v1/jobs/{job}/shell", headers=world.own.headers)
        for what, job in jobs.items()
    ]
    return [*found, HttpAsk(label="nowhere", method="GET", path="/v1/teams/blue/jobs", headers=world.own.headers)]


class _Values:
    """What is tried for each parameter and each body."""

    def __init__(self, world: World) -> None:
        own, other = world.own, world.other
        jobs = [(f"own {name}", job) for name, job in own.jobs.items()]
        jobs += [(f"other {name}", job) for name, job in other.jobs.items()]
        self._jobs: Values = [*jobs, ("nobody's", job_id(os.urandom(9)))]
        teams = [("red", RED), ("blue", BLUE), ("green", "green")]
        times = [("before all", "2026-01-01T00:00:00Z"), ("after all", "2099-01-01T00:00:00Z")]
        people = [("ann", PERSON), ("blue's", "bob")]
        sides = ((own, "own"), (other, "other"))
        self._bodies = _bodies(world, self._jobs)
        self._by_name: dict[str, Values] = {
            "job_id": self._jobs,
            "path": [("own or other", "plan.txt"), ("none", "nothing.txt")],
            "token_id": [("own", own.token), ("other", other.token), ("nobody's", base32(os.urandom(5), 8))],
            "team": teams,
            "channel_id": [("own", own.channel), ("other", other.channel)],
            "label": [("ann", "who:ann"), ("red", "team:red"), ("blue", "team:blue")],
            "state": [("queued", "queued"), ("active", "active"), ("failed", "failed")],
            "owner": people, "actor": people, "user": people,
            "since": times, "until": times,
            "limit": [("1", "1"), ("3", "3")],
            "cursor": [(what, world.cursor(side.jobs["running"])) for side, what in sides],
            "after": [("1", "1"), ("99", "99")],
            "follow": [("0", "0")],
            "attempt": [("1", "1"), ("2", "2")],
            "resume": [("0", "0")],
            "provider": [("one", "simulated")], "cloud": [("one", "alpha"), ("none", "beta")],
            "accelerator": [("one", "l40s")],
            "format": [("csv", "csv"), ("jsonl", "jsonl")],
            "sha256": [(what, side.ref.removeprefix("upload:")) for side, what in sides],
            "action": [("submit", "job.submit"), ("tokens", "token"), ("teams", "team")],
            "target": [(what, side.jobs["running"]) for side, what in sides] + [("BLUE_ONLY", "BLUE_ONLY")],
            "by": [(way, way) for way in ("user", "team", "cloud", "gpu", "day", "month")],
            "zone": [("Berlin", "Europe/Berlin")],
            "workspace": [("one", "T1")],
            "Idempotency-Key": [("own", "queued"), ("shared", "shared")],
            "Last-Event-ID": [("1", "1"), ("other's", f"{other.attempt};0/boot-0")],
        }  # fmt: skip
        self._by_operation: dict[tuple[str, str], Values] = {
            ("set_secret", "name"): [("KEY", "KEY"), ("BLUE_ONLY", "BLUE_ONLY")],
            ("delete_secret", "name"): [("KEY", "KEY"), ("BLUE_ONLY", "BLUE_ONLY")],
            ("upload", "name"): [("words", "words.csv"), ("code", "code.tar")],
            ("list_audit", "cursor"): [("any", world.cursor(str(uuid4())))],
            ("unlink_slack_user", "user"): [("U1", "U1"), ("U2", "U2")],
        }

    def of(self, name: str, operation: Mapping[str, Any]) -> Values:
        found = self._by_operation.get((operation["operationId"], name)) or self._by_name.get(name)
        if found is None:
            raise Unplayed(f"{operation['operationId']} takes {name}: give values to try in http_asks.py")
        return found

    def bodies(self, operation: Mapping[str, Any]) -> Values:
        content = operation.get("requestBody", {}).get("content", {})
        if not content:
            return [("", None)]
        ref = next(iter(content.values()))["schema"].get("$ref", operation["operationId"])
        name = re.sub(r"-(In|Out)put$", "", ref.rsplit("/", 1)[-1])
        if name not in self._bodies:
            raise Unplayed(f"{operation['operationId']} takes a {name}: give bodies to try in http_asks.py")
        return self._bodies[name]


def _bodies(world: World, jobs: Values) -> dict[str, Values]:
    """By the name of the body's schema, else of the operation."""
    own, other = world.own, world.other
    hook = {"kind": "webhook", "name": "hook", "secrets": {"url": "https://hook.invalid/"}}
    token, link, teams = {"owner": PERSON, "scopes": ["read"]}, {"user": "U2", "owner": PERSON}, (RED, BLUE, "green")
    specs: list[tuple[str, Any]] = [
        (" own data", spec(own.ref)),
        (" other's data", spec(other.ref)),
        (" other's archive", spec(own.ref, train=None, script={"code": other.archive, "command": ["a"]})),
        (" a secret of both", spec(own.ref, secrets=["KEY"])),
        (" other's secret", spec(own.ref, secrets=["BLUE_ONLY"])),
        (" over the limit", spec(own.ref, cap_usd="60")),
        *((f" from {what}", spec(own.ref, init_from=f"job/{job}")) for what, job in jobs),
    ]
    return {
        "JobSpec": specs,
        "QuoteSpec": specs,
        "CapChange": [(" to 9", {"cap_usd": "9"}), (" to 1", {"cap_usd": "1"})],
        "SecretValue": [(" to x", {"value": "x"})],
        "TokenRequest": [
            (" own", token),
            (" admin", {**token, "scopes": ["admin"]}),
            *((f" of {team}", {**token, "team": team}) for team in teams),
        ],
        "TeamRequest": [(f" {team}", {"name": team}) for team in teams],
        "upload": [(f" {mark}", data_set(mark)) for mark in ("red's own", "blue's own")],
        "ChannelRequest": [
            (" again", hook),
            (" new", {**hook, "name": "h1"}),
            (" of all", {**hook, "installation": True}),
            *((f" of {team}", {**hook, "name": "h2", "team": team}) for team in teams),
        ],
        "ChannelChange": [(" off", {"enabled": False}), (" on", {"enabled": True})],
        "slack_request": [(" unsigned", b"payload=%7B%7D")],
        "SlackLinkRequest": [(" own", link), *((f" of {team}", {**link, "team": team}) for team in teams)],
    }

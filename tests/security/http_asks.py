"""Calls of every operation of the OpenAPI document, with every parameter, as red: about red's, blue's and unused IDs.

A parameter of the document that this file lacks raises Unplayed, so that a new operation cannot be forgotten.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from broker.api.app import APIS
from broker.api.http.openapi import document
from tests.security.tried import ParameterValues
from tests.security.world import World

DESTRUCTIVE_OPERATIONS = (
    "cancel_job", "refuse_job", "delete_data", "delete_token",
    "delete_secret", "delete_channel", "unlink_slack_user", "delete_policy",
)  # fmt: skip
"""Operations that remove rows which other calls read."""


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
    operations.sort(key=lambda one: (one[0] != "GET", one[2]["operationId"] in DESTRUCTIVE_OPERATIONS))
    values = ParameterValues(world)
    made = [ask for one in operations for ask in _of(world, values, *one)]
    made += _beside(world)
    twice = [label for label in {ask.label for ask in made} if sum(ask.label == label for ask in made) > 1]
    assert not twice, twice
    return made


@dataclass(frozen=True, kw_only=True)
class _Variation:
    """One parameter with its value."""

    what: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


def _of(
    world: World, values: ParameterValues, method: str, path: str, operation: Mapping[str, Any]
) -> Iterator[HttpAsk]:
    """Return calls of every target with each body, then with each value of each parameter."""
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


def _targets(values: ParameterValues, path: str, operation: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (label of the path's object, path)."""
    names = [one["name"] for one in operation["parameters"] if one["in"] == "path"]
    for chosen in itertools.product(*(values.of(name, operation) for name in names)):
        about, filled = "", path
        for name, (what, value) in zip(names, chosen, strict=True):
            about, filled = f"{about} {name}={what}", filled.replace("{" + name + "}", str(value))
        yield about, filled


def _queries(operation: Mapping[str, Any], *, needed: bool) -> list[Mapping[str, Any]]:
    return [one for one in operation["parameters"] if one["in"] == "query" and bool(one.get("required")) >= needed]


def _variations(values: ParameterValues, operation: Mapping[str, Any]) -> Iterator[_Variation]:
    for one in operation["parameters"]:
        for what, value in values.of(one["name"], operation) if one["in"] != "path" else ():
            given = {one["name"]: str(value)}
            query, headers = (given, {}) if one["in"] == "query" else ({}, given)
            yield _Variation(what=f" {one['name']}={what}", query=query, headers=headers)


def _beside(world: World) -> list[HttpAsk]:
    """Return calls outside the operations: the shell, and addresses that do not exist."""
    sides = (("own", world.own), ("other", world.other))
    jobs = {f"{what} {name}": job for what, side in sides for name, job in side.jobs.items()}
    found = [
        HttpAsk(label=f"shell job_id={what}", method="GET", path=f"/v1/jobs/{job}/shell", headers=world.own.headers)
        for what, job in jobs.items()
    ]
    return [*found, HttpAsk(label="nowhere", method="GET", path="/v1/teams/blue/jobs", headers=world.own.headers)]

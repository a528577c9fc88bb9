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
    operations.sort(key=lambda entry: (entry[0] != "GET", entry[2]["operationId"] in DESTRUCTIVE_OPERATIONS))
    values = ParameterValues(world)
    asks = [ask for entry in operations for ask in _asks_of_operation(world, values, *entry)]
    asks += _other_asks(world)
    twice = [label for label in {ask.label for ask in asks} if sum(ask.label == label for ask in asks) > 1]
    assert not twice, twice
    return asks


@dataclass(frozen=True, kw_only=True)
class _Variation:
    """One parameter with its value."""

    label: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


def _asks_of_operation(
    world: World, values: ParameterValues, method: str, path: str, operation: Mapping[str, Any]
) -> Iterator[HttpAsk]:
    """Return calls of every target with each body, then with each value of each parameter."""
    name, plain = operation["operationId"], _Variation()
    targets = list(_targets(values, path, operation))
    needed = {p["name"]: str(values.of(p["name"], operation)[0][1]) for p in _queries(operation, needed=True)}
    bodies = values.bodies(operation)
    variations = [(body, plain) for body in bodies]
    variations += [(bodies[0], variation) for variation in _variations(values, operation)]
    for (target, filled), ((body_label, body), variation) in itertools.product(targets, variations):
        raw = isinstance(body, bytes)
        kind = {"Content-Type": "application/octet-stream"} if raw else {}
        yield HttpAsk(
            label=f"{name}{target}{body_label}{variation.label}",
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
    names = [parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "path"]
    for chosen in itertools.product(*(values.of(name, operation) for name in names)):
        target, filled = "", path
        for name, (label, value) in zip(names, chosen, strict=True):
            target, filled = f"{target} {name}={label}", filled.replace("{" + name + "}", str(value))
        yield target, filled


def _queries(operation: Mapping[str, Any], *, needed: bool) -> list[Mapping[str, Any]]:
    """Return the query parameters of an operation. `needed`: only those that it requires."""
    return [p for p in operation["parameters"] if p["in"] == "query" and bool(p.get("required")) >= needed]


def _variations(values: ParameterValues, operation: Mapping[str, Any]) -> Iterator[_Variation]:
    for parameter in operation["parameters"]:
        name, place = parameter["name"], parameter["in"]
        for label, value in values.of(name, operation) if place != "path" else ():
            given = {name: str(value)}
            query, headers = (given, {}) if place == "query" else ({}, given)
            yield _Variation(label=f" {name}={label}", query=query, headers=headers)


def _other_asks(world: World) -> list[HttpAsk]:
    """Return calls outside the operations: the shell, and addresses that do not exist."""
    sides = (("own", world.own), ("other", world.other))
    jobs = {f"{owner} {name}": job for owner, side in sides for name, job in side.jobs.items()}
    shells = [
        HttpAsk(label=f"shell job_id={label}", method="GET", path=f"/v1/jobs/{job}/shell", headers=world.own.headers)
        for label, job in jobs.items()
    ]
    return [*shells, HttpAsk(label="nowhere", method="GET", path="/v1/teams/blue/jobs", headers=world.own.headers)]

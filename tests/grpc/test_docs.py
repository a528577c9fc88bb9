"""The methods and errors in docs/reference/grpc.md are those of the code."""

import re
from pathlib import Path

from broker.api.core.auth import Unauthenticated
from broker.api.core.problems import NotFound
from broker.api.core.status_codes import ANSWERS
from broker.api.grpc.anonymous_limits import OPEN
from broker.api.grpc.server import FILES
from broker.domain.errors import GpubrokerError

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "grpc.md").read_text()
SERVICES = [service for file in FILES for service in file.DESCRIPTOR.services_by_name.values()]


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table whose header begins with `heading`."""
    table = PAGE[PAGE.index(heading) :].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_every_method_is_in_the_table_of_its_service() -> None:
    documented_methods: dict[str, set[str]] = {}
    for services, methods in rows("| service | methods |"):
        names = re.findall(r"`([\w.]+)`", services)
        parts = methods.split(";") if len(names) > 1 else [methods]
        for name, part in zip(names, parts, strict=True):
            documented_methods[name] = set(re.findall(r"`([A-Z]\w+)`", part))
    for service in SERVICES:
        assert documented_methods.pop(service.name) == {method.name for method in service.methods}
    assert set(documented_methods) == {"grpc.health.v1.Health"}
    assert all(f"/{name}/" in " ".join(OPEN) for name in documented_methods)


def test_every_status_is_in_the_table_with_its_counterpart() -> None:
    documented_answers = {
        (status.strip("`"), int(code))
        for status, codes, _ in rows("| status | as HTTP's | |")
        for code in codes.split(",")
    }
    assert documented_answers == {(answer.grpc, answer.http) for answer in ANSWERS.values()}


def kinds(base: type[GpubrokerError]) -> set[type[GpubrokerError]]:
    return {base, *(kind for one in base.__subclasses__() for kind in kinds(one))}


def test_every_error_of_the_api_has_an_answer() -> None:
    ours = {kind for kind in kinds(GpubrokerError) if kind.__module__.startswith("broker.api.")}
    assert {kind.__name__ for kind in ours if not issubclass(kind, tuple(ANSWERS))} == set()
    assert ours >= {NotFound, Unauthenticated}

"""Raw answers of one cloud, stored for comparison and wrapped so that they record which fields our code reads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from graphql import DocumentNode, build_schema, parse

from broker.domain.ids import ID_LENGTH, Installation, name_prefix
from tests.clouds.runpod_api import SDL
from tests.clouds.schema import Schema
from tests.live.shapes import Difference, Shape, of_query

OURS = Installation("live")
ANY_MACHINE = f"{name_prefix(OURS)}{'a' * ID_LENGTH}-{'0' * 8}-head"
"""Name given to every machine of the account, because providers read the machines of one installation only."""
NAMES = frozenset({"instances.data[].name", "instances.instances[].label", "listPods.pods[].name"})
"""Fields that contain a machine's name, over all clouds."""
_VAST = {"/api/v0/bundles/": "bundles", "/api/v1/instances/": "instances", "/api/v0/users/current/": "user"}
_RUNPOD = {
    "/v2/catalog/gpus": "listGpuTypes", "/v2/catalog/datacenters": "listDataCenters", "/v2/pods": "listPods",
    "/v2/billing/pods": "listPodBilling",
}  # fmt: skip
_PATHS = {"vast": _VAST, "runpod": _RUNPOD}
_AWS = Path(__file__).with_name("aws.yaml")


GRAPHQL = "/graphql"


class Watched(dict[str, Any]):
    """Object of an answer that records which of its fields were read."""

    def __init__(self, value: Mapping[str, Any], paths: Mapping[str, str], read: set[str]) -> None:
        """Prepare. `paths`: paths of fields by name; other fields may be queried too."""
        super().__init__(value)
        self._paths, self._read = paths, read

    def _look(self, name: Any) -> None:
        if (path := self._paths.get(name)) is not None:
            self._read.add(path)

    def __getitem__(self, name: Any) -> Any:
        self._look(name)
        return super().__getitem__(name)

    def get(self, name: Any, default: Any = None) -> Any:
        self._look(name)
        return super().get(name, default)

    def __contains__(self, name: Any) -> bool:
        self._look(name)
        return super().__contains__(name)


class Answers:
    """All answers of one cloud; a `guard.Tap`."""

    def __init__(self, cloud: str) -> None:
        self._cloud = cloud
        self._schema = None if cloud == "aws" else Schema(cloud)
        self._graph = build_schema(SDL.read_text(encoding="utf-8")) if cloud == "runpod" else None
        self._aws = yaml.safe_load(_AWS.read_text(encoding="utf-8"))["calls"] if cloud == "aws" else {}
        self.shapes: dict[str, Shape] = {}
        self.read: set[str] = set()
        self.queries: list[DocumentNode] = []
        self.calls = 0

    # ------------------------------------------------------------------------------------------------ tapping the line

    def asked(self, path: str, body: Any) -> None:
        """Record a query, also if it fails: the broker depends on the queried fields."""
        if path == GRAPHQL and "__schema" not in body["query"]:
            self.queries.append(parse(body["query"]))

    def rest(self, path: str, body: Any, answer: Any) -> Any:
        """Return the answer's schema. Raises KeyError for a call that is not in the schema file."""
        self.calls += 1
        if path == GRAPHQL and ("__schema" in body["query"] or answer.get("errors")):
            return answer
        shape = self._shape_of(path, body)
        shape.add(answer)
        return self._watched(shape, shape.schema, answer, shape.call)

    def aws(self, operation: str, answer: Any) -> None:
        self.calls += 1
        if operation not in self._aws:
            return
        self._aws_shape(operation).add({k: v for k, v in answer.items() if k != "ResponseMetadata"})
        for product in map(json.loads, answer.get("PriceList", [])):
            kind = "transfer" if product.get("serviceCode") == "AWSDataTransfer" else "product"
            self._aws_shape(kind).add(product)

    def differences(self) -> list[Difference]:
        """Return all differences from the schema files."""
        found = {d for shape in self.shapes.values() for d in shape.differences(self.read | self._all_of_aws())}
        return sorted(found, key=lambda one: (not one.needed, one.field))

    @property
    def unseen(self) -> int:
        return sum(shape.unseen for shape in self.shapes.values())

    # ---------------------------------------------------------------------------------------------------------- shapes

    def _shape_of(self, path: str, body: Any) -> Shape:
        if path == GRAPHQL:
            assert self._graph is not None
            schema, names = of_query(parse(body["query"]), self._graph)
            call = _call(schema)
            return self.shapes.setdefault(f"{call}{len(self.shapes)}", Shape(call, schema, lenient=True, names=names))
        assert self._schema is not None
        call = _PATHS[self._cloud][path] if self._cloud in _PATHS else path.strip("/")
        return self.shapes.setdefault(call, Shape(call, self._schema.calls[call]["answer"]))

    def _aws_shape(self, call: str) -> Shape:
        return self.shapes.setdefault(call, Shape(call, self._aws[call]["answer"], lenient=True))

    def _all_of_aws(self) -> set[str]:
        """Return all paths of the AWS file, which holds only fields that are read."""
        return {path for call in self._aws if call in self.shapes for path in self.shapes[call].paths}

    # -------------------------------------------------------------------------------------------------------- watching

    def _watched(self, shape: Shape, schema: Any, value: Any, path: str) -> Any:
        if isinstance(value, list):
            part = schema[0] if isinstance(schema, list) else None
            return [self._watched(shape, part, item, f"{path}[]") for item in value]
        if path in NAMES:
            return ANY_MACHINE
        if not isinstance(value, dict):
            return value
        known: Mapping[str, Any] = schema if isinstance(schema, dict) else {}
        paths = {
            name: shape.path(path, name if name in known or "*" not in known else "*") for name in {**known, **value}
        }
        inner = {
            name: self._watched(shape, known.get(name, known.get("*")), item, paths[name])
            for name, item in value.items()
        }
        return Watched(inner, paths, self.read)


def _call(schema: Mapping[str, Any]) -> str:
    """Return a short name of a RunPod query: its first field."""
    root = schema["data"]
    if "myself" in root:
        return "balance"
    return "prices"

"""Bounds of the documents that rented machines write."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from trainer.contract import documents
from trainer.contract.base import MAX_MESSAGE, Document
from trainer.contract.documents import Final, Heartbeat, Manifest, Outcome

KINDS = [
    kind for kind in vars(documents).values()
    if isinstance(kind, type) and issubclass(kind, Document) and kind.__module__ == documents.__name__
    and kind is not documents.Cost  # amounts, not texts
]  # fmt: skip


def unbounded(schema: Any, path: str = "") -> Iterator[str]:
    """Yield the places of texts without a limit."""
    if isinstance(schema, list):
        for number, part in enumerate(schema):
            yield from unbounded(part, f"{path}/{number}")
    elif isinstance(schema, dict):
        limits = {"maxLength", "enum", "const", "pattern", "format"}
        if schema.get("type") == "string" and not limits & schema.keys():
            yield path
        for key, part in schema.items():
            yield from unbounded(part, f"{path}/{key}")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_text_of_a_document_has_a_limit(kind: type[Document]) -> None:
    schema = kind.model_json_schema()
    own = {name: part for name, part in schema.get("$defs", {}).items() if name in {k.__name__ for k in KINDS}}
    assert list(unbounded(schema["properties"])) == []
    assert list(unbounded(own)) == []


def test_a_long_message_is_shortened_and_a_long_name_is_refused() -> None:
    final = Final.model_validate_json(json.dumps({"attempt": "a", "outcome": "data", "message": "x" * 100_000}))
    assert (len(final.message), final.message[-2:]) == (MAX_MESSAGE, "x…")
    assert Final(attempt="a", outcome=Outcome.DATA, message="short").message == "short"
    for document in ({"attempt": "a" * 300}, {"attempt": "a", "step": 10**30}, {"attempt": "a", "boot": "b" * 10_000}):
        with pytest.raises(ValidationError):
            Final.model_validate_json(json.dumps({"outcome": "data"} | document))
    with pytest.raises(ValidationError):
        Heartbeat.model_validate_json(json.dumps({"attempt": "a", "boot": "b", "seq": 10**400}))
    files = [{"path": "x" * 5000, "bytes": 1, "sha256": "0"}]
    with pytest.raises(ValidationError):
        Manifest.model_validate({"job": "j", "attempt": "a", "step": 1, "kind": "train", "files": files})

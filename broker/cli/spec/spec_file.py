"""Reads, overrides and checks a spec file. Every error names file and line, or the option that set the value."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from broker.api.core.problems import invalid_input_of
from broker.api.schemas.quotes import QuoteSpec, QuoteView
from broker.cli.core.durations import future, is_relative
from broker.cli.core.exit_codes import BadInput
from broker.cli.spec import overrides, schema
from trainer.contract.yaml_document import BadYaml, YamlDocument, parse

UPLOAD = "upload:"
MAX_SPEC_BYTES = 1024**2
Given = Mapping[schema.Path, str]
"""Option that overrides a value of the file, by path."""


@dataclass(frozen=True, kw_only=True)
class SpecFile:
    """A spec file with a valid `spec`, whose file paths are still relative to the folder of `path`."""

    path: Path
    document: YamlDocument
    given: Given
    data: dict[str, Any]
    spec: QuoteSpec
    has_relative_deadline: bool = False
    """True if the deadline is relative, such as `6h`, so that each load computes another time."""

    @property
    def has_cap(self) -> bool:
        return self.data.get("cap_usd") is not None

    def place(self, field: str) -> str:
        """Return `file:line: field` of a dotted field name of the API, or the option that set the field."""
        return _location(self.document, self.given, field)

    def problem(self, pairs: tuple[tuple[str, str], ...]) -> BadInput:
        """Return the API's errors about this spec, one line each, with file and line."""
        return _bad_input(self.document, self.given, pairs)

    def file(self, path_text: str) -> Path:
        """Return a path of the spec, resolved against the folder of the spec."""
        return self.path.parent / os.path.expanduser(path_text)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A spec as the API takes it, with uploaded files, and its quote."""

    file: SpecFile
    body: dict[str, Any]
    """The request body: the spec with references to uploads in place of paths."""
    quote: QuoteView
    columns: tuple[str, ...] = ()
    """Columns of the uploaded data set; empty if unknown."""


def load(path: Path, settings: tuple[str, ...] = (), **options: Any) -> SpecFile:
    """Read and check a spec file. `options`: values of top-level settings that have their own option; None: not given.

    Raises BadInput naming file, line and field, or the option.
    """
    document = parsed(path, hint=f"; `gpubroker init {path}` writes a spec to start from")
    data, sources = overrides.apply(document.data, settings, document.texts)
    for name, value in options.items():
        if value is not None:
            data[name], sources[(name,)] = value, f"--{name.replace('_', '-')}"
    relative = _resolve_deadline(data)
    try:
        spec = QuoteSpec.model_validate(data)
    except ValidationError as e:
        problems = invalid_input_of(e, QuoteSpec, data, root="").problems
        raise _bad_input(document, sources, tuple((p.field, p.message) for p in problems)) from None
    return SpecFile(path=path, document=document, given=sources, data=data, spec=spec, has_relative_deadline=relative)


def _resolve_deadline(data: dict[str, Any]) -> bool:
    """Replace a relative deadline, such as `6h`, with its time. Return True if the deadline was relative.

    The model refuses other wrong values.
    """
    text = data.get("deadline")
    if not isinstance(text, str):
        return False
    try:
        data["deadline"] = future("deadline", text).isoformat()
    except BadInput:
        return False
    return is_relative(text)


def parsed(path: Path, *, hint: str = "") -> YamlDocument:
    """Parse a short YAML file. Raises BadInput with file and line, or with `hint` if the file is missing."""
    try:
        return parse(_spec_text(path, hint), str(path))
    except BadYaml as e:
        raise BadInput(str(e)) from None


def _spec_text(path: Path, hint: str) -> str:
    try:
        raw = path.read_bytes()
    except IsADirectoryError:
        raise BadInput(f"{path} is a folder; give the file in it") from None
    except OSError as e:
        raise BadInput(f"{path}: {e.strerror}{hint}") from None
    if len(raw) > MAX_SPEC_BYTES:
        raise BadInput(f"{path} has {len(raw)} bytes; it should be a short YAML or JSON file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise BadInput(f"{path}: byte {e.start} is not UTF-8; save the file as UTF-8") from None


def _bad_input(document: YamlDocument, sources: Given, pairs: tuple[tuple[str, str], ...]) -> BadInput:
    lines = [f"{_location(document, sources, field)}: {message}" for field, message in pairs]
    return BadInput("\n".join(lines), problems=pairs)


def _location(document: YamlDocument, sources: Given, field: str) -> str:
    path = tuple(field.split(".")) if field else ()
    for depth in range(len(path), 0, -1):
        if (option := sources.get(path[:depth])) is not None:
            is_named = depth == len(path) or (depth == len(path) - 1 and path[-1].isdecimal())
            return option if is_named else f"{option}: {field}"
    return f"{document.place(path)}: {field}" if field else document.place(path)

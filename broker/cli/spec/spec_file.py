"""A spec file as the user wrote it: read, overridden, checked; every fault named by file and line, or by the option."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from broker.api.core.problems import of_validation
from broker.api.schemas.quotes import QuoteSpec
from broker.cli.core.exit_codes import BadInput
from broker.cli.spec import overrides, schema
from trainer.contract import yaml_document as yamlfile
from trainer.contract.yaml_document import BadYaml, YamlDocument

UPLOAD = "upload:"
MAX_SPEC_BYTES = 1024**2
Given = Mapping[schema.Path, str]
"""The option that set what is not the file's, by path."""


@dataclass(frozen=True, kw_only=True)
class SpecFile:
    """`spec` is valid; its files are still the user's paths, relative to `folder`."""

    path: Path
    document: YamlDocument
    given: Given
    data: dict[str, Any]
    spec: QuoteSpec

    @property
    def has_cap(self) -> bool:
        return self.data.get("cap_usd") is not None

    def place(self, field: str) -> str:
        """`file:line: field` of a dotted field, as the API names it, or the option that set it."""
        return _place(self.document, self.given, field)

    def problem(self, pairs: tuple[tuple[str, str], ...]) -> BadInput:
        """The API's problems with this spec, one line each, by place."""
        return _bad_input(self.document, self.given, pairs)

    def file(self, written: str) -> Path:
        """A path of the spec, relative to the folder of the spec."""
        return self.path.parent / os.path.expanduser(written)


def load(path: Path, settings: tuple[str, ...] = (), **options: Any) -> SpecFile:
    """`options`: top-level settings that have an option of their own, None where it was not given.

    Raises BadInput naming file, line and field, or the option.
    """
    document = parsed(path, otherwise=f"; `gpubroker init {path}` writes a spec to start from")
    data, given = overrides.apply(document.data, settings)
    for name, value in options.items():
        if value is not None:
            data[name], given[(name,)] = value, f"--{name.replace('_', '-')}"
    try:
        spec = QuoteSpec.model_validate(data)
    except ValidationError as e:
        problems = of_validation(e, QuoteSpec, data, root="").problems
        raise _bad_input(document, given, tuple((p.field, p.message) for p in problems)) from None
    return SpecFile(path=path, document=document, given=given, data=data, spec=spec)


def parsed(path: Path, *, otherwise: str = "") -> YamlDocument:
    """A short file as it is written. Raises BadInput with file and line, and with `otherwise` where there is none."""
    try:
        return yamlfile.parse(_read(path, otherwise), str(path))
    except BadYaml as e:
        raise BadInput(str(e)) from None


def _read(path: Path, otherwise: str) -> str:
    try:
        raw = path.read_bytes()
    except IsADirectoryError:
        raise BadInput(f"{path} is a folder; give the file in it") from None
    except OSError as e:
        raise BadInput(f"{path}: {e.strerror}{otherwise}") from None
    if len(raw) > MAX_SPEC_BYTES:
        raise BadInput(f"{path} has {len(raw)} bytes; it should be a short YAML or JSON file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise BadInput(f"{path}: byte {e.start} is not UTF-8; save the file as UTF-8") from None


def _bad_input(document: YamlDocument, given: Given, pairs: tuple[tuple[str, str], ...]) -> BadInput:
    lines = [f"{_place(document, given, field)}: {message}" for field, message in pairs]
    return BadInput("\n".join(lines), problems=pairs)


def _place(document: YamlDocument, given: Given, field: str) -> str:
    path = tuple(field.split(".")) if field else ()
    for depth in range(len(path), 0, -1):
        if (option := given.get(path[:depth])) is not None:
            return option if depth == len(path) else f"{option}: {field}"
    return f"{document.place(path)}: {field}" if field else document.place(path)

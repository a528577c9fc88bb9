"""The reference documentation matches the code, and the examples are valid."""

import json
from pathlib import Path

import jsonschema_rs
import pytest
from typer.main import get_command

from broker.cli import docs_reference as reference
from broker.cli.main import app
from broker.cli.spec.spec_file import load
from broker.domain.spec import JobSpec
from trainer.contract import yaml_document as yamlfile

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", reference.FILES)
def test_reference_is_current(name: str) -> None:
    written = (ROOT / "docs" / name).read_text()
    assert written == reference.FILES[name](), f"run `python -m {reference.__name__} docs`"


@pytest.mark.parametrize("name", reference.TAILS)
def test_generated_end_of_a_page_is_current(name: str) -> None:
    written = (ROOT / "docs" / name).read_text()
    assert reference.MARK in written
    current = reference.with_tail(written, reference.TAILS[name]())
    assert written == current, f"run `python -m {reference.__name__} docs`"


def test_every_command_has_an_area() -> None:
    named = [name for names in reference.AREAS.values() for name in names]
    assert sorted(named) == sorted(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["devils-dictionary.yaml", "script.yaml"])
def test_examples_validate_by_model_and_by_schema(name: str) -> None:
    path = ROOT / "examples" / name
    file = load(path)
    assert file.has_cap
    JobSpec.model_validate(file.data)
    jsonschema_rs.validate(json.loads(reference.json_schema()), yamlfile.parse(path.read_text(), name).data)
    named = file.spec.train.data.path if file.spec.train else file.spec.script.code if file.spec.script else ""
    assert file.file(named).exists()

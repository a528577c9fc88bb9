"""The reference documentation is what the code says, and the examples are what they claim to be."""

import json
from pathlib import Path

import jsonschema_rs
import pytest

from broker.cli import docs_reference as reference
from broker.cli.spec.spec_file import load
from broker.domain.spec import JobSpec
from trainer.contract import yaml_document as yamlfile

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", reference.FILES)
def test_reference_is_current(name: str) -> None:
    written = (ROOT / "docs" / name).read_text()
    assert written == reference.FILES[name](), "run `python -m broker.cli.docs_reference docs`"


@pytest.mark.parametrize("name", ["devils-dictionary.yaml", "script.yaml"])
def test_examples_validate_by_model_and_by_schema(name: str) -> None:
    path = ROOT / "examples" / name
    file = load(path)
    assert file.has_cap
    JobSpec.model_validate(file.data)
    jsonschema_rs.validate(json.loads(reference.json_schema()), yamlfile.parse(path.read_text(), name).data)
    named = file.spec.train.data.path if file.spec.train else file.spec.script.code if file.spec.script else ""
    assert file.file(named).exists()

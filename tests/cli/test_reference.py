"""The reference documentation matches the code, and the examples are valid."""

import json
from pathlib import Path

import jsonschema_rs
import pytest
from typer.main import get_command

from broker.cli import docs_reference as reference
from broker.cli.main import app
from broker.cli.spec import schema
from broker.cli.spec.allowed_values import allowed_values
from broker.cli.spec.schema_file import json_schema
from broker.cli.spec.spec_file import load
from broker.domain.spec import JobSpec
from trainer.contract import yaml_document as yamlfile

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", reference.FILES)
def test_reference_is_current(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    assert text == reference.FILES[name](), f"run `python -m {reference.__name__} docs`"


@pytest.mark.parametrize("name", reference.TAILS)
def test_generated_end_of_a_page_is_current(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    assert reference.MARK in text
    current = reference.with_tail(text, reference.TAILS[name]())
    assert text == current, f"run `python -m {reference.__name__} docs`"


def test_every_command_has_an_area() -> None:
    named = [name for names in reference.AREAS.values() for name in names]
    assert sorted(named) == sorted(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["devils-dictionary.yaml", "script.yaml"])
def test_examples_validate_by_model_and_by_schema(name: str) -> None:
    path = ROOT / "examples" / name
    file = load(path)
    assert file.has_cap
    JobSpec.model_validate(file.data)
    jsonschema_rs.validate(json.loads(json_schema()), yamlfile.parse(path.read_text(), name).data)
    named = file.spec.train.data.path if file.spec.train else file.spec.script.code if file.spec.script else ""
    assert file.file(named).exists()


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("resources.spot", "`allowed`, `never`, `only`"),
        ("resources.gpus", "whole number from 1 to 64, `auto`"),
        ("train.method.kind", "`lora`, `qlora`, `full`"),
        ("train.method.targets", "`all-linear`, `attention`, list of texts"),
        ("train.seed", "whole number from 0 to 2147483647"),
        ("train.tf32", "`true`, `false`"),
        ("retry.on", "list of `preempted`, `lost`"),
        ("max_duration", "whole number from 60 to 31536000, `90s`, `1h30m`, `7d`"),
        ("deadline", "time"),
        ("env", "mapping"),
        ("train", ""),
        ("no.such", ""),
    ],
)
def test_allowed_values_of_a_setting_in_words(path: str, values: str) -> None:
    written = allowed_values(tuple(path.split(".")))
    assert written.startswith(values) if values else written == ""


def test_every_setting_that_is_no_group_has_values() -> None:
    assert [path for path in schema.paths() if not schema.models(path) and not allowed_values(path)] == []

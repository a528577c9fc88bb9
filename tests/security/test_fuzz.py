"""Sample of `python -m tests.security.fuzz`: parsers of untrusted data accept or refuse any bytes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiers
from tests.security.fuzz.seeds import seeds
from tests.security.fuzz.targets import TARGETS
from trainer.contract import yaml_document

REFUSED = {("json", 2), ("yaml", 1)}
"""Seeds that are refused: JSON in UTF-16, and an alias that contains itself."""


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_file_without_changes_is_accepted(name: str) -> None:
    for number, data in enumerate(seeds()[name]):
        if (name, number) in REFUSED:
            with pytest.raises(TARGETS[name].refusals):
                TARGETS[name].run(data)
        else:
            TARGETS[name].run(data)


def test_changed_files_crash_and_stall_no_parser(tmp_path: Path) -> None:
    """The seed of the cases is the commit."""
    seed = int(tiers.commit() or "0", 16) % 2**32
    command = [sys.executable, "-m", "tests.security.fuzz", "--cases", "1300", "--seed", str(seed), "--kept", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"crashes": 0, "stalls": 0' in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("character", ["\0", "\x1b", "\ufffe"])
def test_a_character_that_yaml_forbids_is_named_with_its_line(character: str) -> None:
    with pytest.raises(yaml_document.BadYaml, match=r"^job.yaml:3: not YAML: unacceptable character"):
        yaml_document.parse(f"name: a\ncap_usd: 1\nx: {character}\n", "job.yaml")


def test_a_value_nested_too_deep_stays_text() -> None:
    text = "[" * 5000
    assert yaml_document.parse_value(text) == text


@pytest.mark.parametrize(
    "value", ["!!timestamp 2001-02-30", "!!timestamp x", "!!float x", "!!bool x", "!!int 0x1", "!!float {a: 1}"]
)
def test_a_value_that_is_not_of_its_yaml_tag_is_refused_with_its_line(value: str) -> None:
    """PyYAML raises ValueError, KeyError or AttributeError: the pages answered 500, the CLI showed a traceback."""
    with pytest.raises(yaml_document.BadYaml, match=r"^job.yaml:2: not YAML: a "):
        yaml_document.parse(f"a: 1\nb: {value}\n", "job.yaml")
    assert yaml_document.parse_value(value) == value

"""`gpubroker sweep` without a daemon: whose machines, by which configuration."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from broker.cli.main import app
from tests.cli.conftest import Ran

HERE = "abcd"


def sweep(*words: str) -> Ran:
    result = CliRunner().invoke(app, ["sweep", "--once", "--json", *words], catch_exceptions=False)
    return Ran(code=result.exit_code, out=result.stdout, err=result.stderr)


@pytest.fixture
def theirs(own_home: Path) -> Path:
    """A home that is not the default one."""
    home = own_home / "theirs"
    home.mkdir()
    (home / "installation").write_text(f"{HERE}\n")
    (home / "gpubroker.yaml").write_text("providers: {local: null, simulated: {body: virtual}}\n")
    return home


def test_a_named_home_is_the_one_that_is_swept(theirs: Path) -> None:
    ran = sweep("--home", str(theirs))
    assert (ran.code, ran.document["installation"]) == (0, HERE), ran.err


def test_a_configuration_that_names_its_home_is_enough(theirs: Path) -> None:
    elsewhere = theirs.parent / "elsewhere.yaml"
    elsewhere.write_text((theirs / "gpubroker.yaml").read_text() + f"home: {theirs}\n")
    ran = sweep("--config", str(elsewhere))
    assert (ran.code, ran.document["installation"]) == (0, HERE), ran.err


def test_without_either_nobodys_machines_are_touched(theirs: Path) -> None:
    ran = sweep("--config", str(theirs / "gpubroker.yaml"))
    assert ran.code == 2
    assert "whose machines? give --installation" in ran.err
    assert str(theirs.parent / "home" / "installation") in ran.err

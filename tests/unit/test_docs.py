"""The documents name what exists."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from broker.cli.main import app
from broker.cli.spec import schema
from broker.daemon.config import DaemonConfig

DOCUMENTS = [
    Path("README.md"), Path("CONTRIBUTING.md"), Path("deploy/iam/README.md"), *sorted(Path("docs").glob("*.md")),
]  # fmt: skip


def test_every_setting_of_the_daemon_says_what_it_is() -> None:
    """docs/configuration.md is written from these texts."""
    silent = [
        ".".join(path)
        for path in schema.paths((), DaemonConfig)
        if not schema.fields(path[:-1], DaemonConfig)[path[-1]].description and path[:2] != ("providers", "simulated")
    ]
    assert silent == []


NAMED = re.compile(r"(?:`|^    |; )gpubroker ([a-z-]+)(?: ([a-z-]+))?", re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_commands_that_are_named_exist(document: Path) -> None:
    runner = CliRunner()
    for first, second in set(NAMED.findall(document.read_text())):
        shown = runner.invoke(app, [first, "--help"])
        assert shown.exit_code == 0, first
        if second and "COMMAND" in shown.stdout.splitlines()[1]:
            assert runner.invoke(app, [first, second, "--help"]).exit_code == 0, f"{first} {second}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), target

"""The documents name what exists."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from broker.cli.main import app
from broker.cli.spec import schema
from broker.daemon.config import DaemonConfig

PAGES = sorted(Path("docs").rglob("*.md"))
DOCUMENTS = [Path("README.md"), Path("CONTRIBUTING.md"), Path("deploy/iam/README.md"), *PAGES]
MAX_LINES = 4000
"""Limit for all pages together: longer documentation is not read."""


def test_every_setting_of_the_daemon_is_described() -> None:
    """docs/reference/configuration.md is generated from these texts."""
    silent = [
        ".".join(path)
        for path in schema.paths((), DaemonConfig)
        if not schema.description(path, DaemonConfig) and path[:2] != ("providers", "simulated")
    ]
    assert silent == []


NAMED = re.compile(r"(?:`|^    |; )gpubroker ([a-z-]+)(?: ([a-z-]+))?", re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_commands_that_are_named_exist(document: Path) -> None:
    runner = CliRunner()
    for first, second in set(NAMED.findall(document.read_text())):
        result = runner.invoke(app, [first, "--help"])
        assert result.exit_code == 0, first
        if second.strip("-") == second != "" and "COMMAND" in result.stdout.splitlines()[1]:
            assert runner.invoke(app, [first, second, "--help"]).exit_code == 0, f"{first} {second}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_of_a_page_stay_inside_docs(page: Path) -> None:
    """`make docs` checks the links, and the site has no other files of the repository."""
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).resolve().is_relative_to(Path("docs").resolve()), target


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"[\w./-]+\.md", Path("mkdocs.yml").read_text())
    assert sorted(listed) == sorted(str(page.relative_to("docs")) for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_begins_with_its_purpose(page: Path) -> None:
    title, blank, purpose = page.read_text().splitlines()[:3]
    assert title.startswith("# ")
    assert not blank
    assert purpose[:1].isalpha()


def test_the_pages_are_few_enough_to_read() -> None:
    """Reports are not counted: each holds the measurements of one day, and is not read as a whole."""
    lasting = [page for page in PAGES if page.parent.name != "reports"]
    assert sum(len(page.read_text().splitlines()) for page in lasting) < MAX_LINES


def test_an_entry_of_the_changelog_is_one_short_line() -> None:
    long = [line for line in Path("CHANGELOG.md").read_text().splitlines() if len(line) > 120 or line.startswith("  ")]
    assert long == []


PATHS = re.compile(r"`((?:broker|providers|trainer|tests|examples|benchmarks|deploy)/[\w./-]+\.py)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_named_paths_exist(document: Path) -> None:
    missing = {path for path in PATHS.findall(document.read_text()) if not Path(path).exists()}
    assert missing == set()

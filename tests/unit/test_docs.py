"""The documents name what exists."""

import re
from pathlib import Path

import pytest

from broker.cli import schema
from broker.config import DaemonConfig

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


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), target

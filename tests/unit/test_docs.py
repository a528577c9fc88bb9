"""The documents name what exists."""

import re
from pathlib import Path

import pytest

from broker.config import DaemonConfig, GrantsConfig, LimitsConfig, RhythmConfig

DOCUMENTS = [Path("README.md"), Path("CONTRIBUTING.md"), *sorted(Path("docs").glob("*.md"))]


def test_every_setting_of_the_daemon_is_documented() -> None:
    text = Path("docs/configuration.md").read_text()
    for model in (DaemonConfig, GrantsConfig, RhythmConfig, LimitsConfig):
        for name in set(model.model_fields) - {"home", "rhythm", "limits"}:
            assert f"`{name}`" in text, name


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), target

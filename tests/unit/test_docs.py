"""The documents name what exists."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from broker.config import DaemonConfig, GrantsConfig, LimitsConfig, RhythmConfig, TrainerConfig
from providers.aws import AwsConfig
from providers.lambda_cloud import LambdaConfig
from providers.runpod import RunpodConfig
from providers.sky import SkyConfig
from providers.vast import VastConfig

DOCUMENTS = [
    Path("README.md"), Path("CONTRIBUTING.md"), Path("deploy/iam/README.md"), *sorted(Path("docs").glob("*.md")),
]  # fmt: skip
SECTIONS: dict[str, type[BaseModel]] = {
    "providers.runpod": RunpodConfig, "providers.vast": VastConfig, "providers.lambda": LambdaConfig,
    "providers.aws": AwsConfig, "providers.sky": SkyConfig, "trainer": TrainerConfig, "grants": GrantsConfig,
}  # fmt: skip
OF_EACH_CLOUD = {"endpoint", "emulated"}


def test_every_setting_of_the_daemon_is_documented() -> None:
    text = Path("docs/configuration.md").read_text()
    for model in (DaemonConfig, GrantsConfig, RhythmConfig, LimitsConfig):
        for name in set(model.model_fields) - {"home", "rhythm", "limits"}:
            assert f"`{name}`" in text, name


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_of_a_section_is_in_its_own_table(section: str) -> None:
    text = Path("docs/configuration.md").read_text()
    table = text[text.index(f"| `{section}.…`") :].partition("\n\n")[0]
    for name in set(SECTIONS[section].model_fields) - OF_EACH_CLOUD:
        assert f"| `{name}` |" in table, f"{section}.{name}"
    assert all(f"| `{name}` |" in text for name in OF_EACH_CLOUD)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), target

"""`--read-only`: offers and machines of each cloud by our own providers, and changes in the cloud's answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphql import build_client_schema, build_schema, get_introspection_query

from broker.domain.errors import ProviderError, Rejected
from broker.domain.offer import GpuAsk
from broker.runtime.clock import SystemClock
from providers.aws.api import KEYS
from providers.common.credentials import aws_source, key_of
from providers.common.http_json import Rest
from providers.common.market_rules import OfferFilter
from providers.registry import CLOUD_CLASSES, ProvidersConfig
from providers.runpod.provider import ENDPOINT
from tests.clouds.runpod_api import SDL
from tests.live import introspection
from tests.live.answers import OURS, Answers
from tests.live.guard import reading
from tests.live.shapes import Difference

NAMES = tuple(CLOUD_CLASSES)
UNREADABLE = "unreadable"
_ALL = {"runpod": {"community": True}, "vast": {"verified": False}}
"""Settings with which a cloud shows all its offers."""


@dataclass(kw_only=True)
class CloudFindings:
    """Findings on one cloud."""

    cloud: str
    skipped: str = ""
    """Reason why the cloud was not queried, and how to get a key; empty: it was queried."""
    error: str = ""
    calls: int = 0
    offers: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    machines: int = 0
    differences: list[Difference] = field(default_factory=list)
    unseen: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.error and not any(difference.needed for difference in self.differences)


def missing(cloud: str, env: Mapping[str, str], home: Path) -> str:
    """Return the missing part of a cloud's credentials and how to get it; empty if there are credentials."""
    if cloud == "aws":
        return "" if aws_source(env, home) else f"AWS: no keys; {KEYS}"
    try:
        key_of(cloud, env, home)
    except Rejected as e:
        return str(e)
    return ""


async def look(cloud: str, endpoint: str | None, env: Mapping[str, str], home: Path) -> CloudFindings:
    """Compare one cloud's answers with the schema files; send read requests only."""
    cloud_findings, answers = CloudFindings(cloud=cloud), Answers(cloud)
    settings = {"endpoint": endpoint, **_ALL.get(cloud, {})}
    section = ProvidersConfig.model_validate({cloud: settings}).rented()[cloud]
    native = CLOUD_CLASSES[cloud][0](section, installation=OURS, clock=SystemClock(), env=env, home=home)
    with reading(answers):
        try:
            if (problem := await native.check()) is not None:
                cloud_findings.notes.append(problem)
            offer_filter = OfferFilter(GpuAsk())
            await native.rows(offer_filter)
            cloud_findings.offers, cloud_findings.dropped = len(offer_filter.offers), offer_filter.dropped
            cloud_findings.machines = len(await native.list())
        except ProviderError as e:
            cloud_findings.error = str(e)
        except Exception as e:  # what a provider meets in an answer that has changed; the differences say more
            cloud_findings.error = f"its answers cannot be read: {e!r}"
        finally:
            await native.close()
        cloud_findings.differences, cloud_findings.unseen, cloud_findings.calls = (
            answers.differences(),
            answers.unseen,
            answers.calls,
        )
        if cloud == "runpod" and answers.queries:
            await _introspect(cloud_findings, answers, endpoint, key_of("runpod", env, home).key)
    if cloud_findings.dropped.get(UNREADABLE):
        cloud_findings.error = (
            cloud_findings.error or f"{cloud_findings.dropped[UNREADABLE]} rows of what it sells cannot be read"
        )
    return cloud_findings


async def _introspect(found: CloudFindings, answers: Answers, endpoint: str | None, key: str) -> None:
    """Compare RunPod's types, if it publishes them; otherwise only its answers are compared."""
    headers = {"Authorization": f"Bearer {key}"}
    api = Rest("RunPod", endpoint or ENDPOINT, headers, key_help="")
    ours = build_schema(SDL.read_text(encoding="utf-8"))
    try:
        said: Any = await api.call("POST", "/graphql", {"query": get_introspection_query(descriptions=False)})
    except ProviderError as e:
        said = {"errors": [{"message": str(e)}]}
    finally:
        await api.close()
    if not isinstance(said, dict) or not isinstance(said.get("data"), dict):
        found.notes.append("RunPod does not describe its API, so fields were checked by its answers alone")
        return
    theirs = build_client_schema(said["data"])
    found.differences += introspection.differences(ours, theirs, introspection.used(answers.queries, ours))

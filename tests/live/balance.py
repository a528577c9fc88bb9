"""Balance of an account whose cloud reports it: RunPod and Vast, which are paid in advance."""

from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from broker.domain.errors import ProviderError
from providers.common.credentials import key_of
from providers.common.http_json import Rest
from providers.runpod import provider as runpod
from providers.vast import provider as vast


async def balance(cloud: str, env: Mapping[str, str], home: Path, endpoint: str | None = None) -> Decimal | None:
    """Return the balance in dollars; None for Lambda, which has no such call, and AWS, whose call lags and costs."""
    if cloud not in ("runpod", "vast"):
        return None
    base = endpoint or {"runpod": runpod.ENDPOINT, "vast": vast.ENDPOINT}[cloud]
    try:
        api = Rest(cloud, base, {"Authorization": f"Bearer {key_of(cloud, env, home).key}"}, key_help="")
    except ProviderError:
        return None
    try:
        told = await _told(cloud, api)
    except (ProviderError, KeyError, TypeError):
        return None
    finally:
        await api.close()
    return None if told is None else Decimal(str(told))


async def _told(cloud: str, api: Rest) -> Any:
    if cloud == "vast":
        return (await api.call("GET", "/api/v0/users/current/"))["credit"]
    answer = await api.call("POST", "/graphql", {"query": "query { myself { clientBalance } }"})
    return answer["data"]["myself"]["clientBalance"]

"""RunPod provider: pods in data centres (secure) and on private hosts (community), on demand and by bid.

All calls use its GraphQL API (graphql-spec.runpod.io). A pod runs the image itself, so no `docker run` is needed.
"""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from broker.domain.errors import Gone, OutcomeUnknown, ProviderError, Rejected, Throttled
from broker.domain.ids import Installation
from broker.domain.instance import BootSpec, Caps, InstanceState, Observed
from broker.domain.job import Handle
from broker.domain.money import show, usd
from broker.domain.offer import Offer
from broker.ports import Clock
from providers.common.cloud import Purchase
from providers.common.credentials import digest_of, key_help, key_of, sky_files
from providers.common.gpu_names import GB, accelerator
from providers.common.http_json import Rest
from providers.common.market_rules import OfferFilter
from providers.common.skypilot_names import cluster_of, gpu_columns
from providers.runpod.market import RunpodMarket
from trainer.contract.base import Config

ENDPOINT = "https://api.runpod.io"
LOW_BALANCE_USD = Decimal(1)
"""Dollars of balance below which `check` warns. RunPod requires an hour's cost (docs.runpod.io/pods/pricing)."""
CAPS = Caps(
    spot=True,
    notice_s=5.0,
    notices="first_process",
    list_lag_s=10.0,
    teardown_s=10.0,
    boot_s=120.0,
    trust="secure",
    # Each pod has a key of its own that can end it: RUNPOD_API_KEY, `Pod-scoped API key`, with RUNPOD_POD_ID
    # (docs.runpod.io/pods/templates/environment-variables; docs.runpod.io/runpodctl/reference/runpodctl). See run.sh.
    self_stop="instance_key",
    agent_start_s=120.0,
)
"""Capabilities of RunPod; billed by the second (docs.runpod.io/pods/pricing). Lag and boot are assumed.

RunPod sends SIGTERM 5 s before an eviction to the container's first process. The trainer's image forwards it. In a
stock image the first process is SkyPilot's shell, which ignores it.
"""
_STATES = {
    "CREATED": InstanceState.STARTING,
    "RESTARTING": InstanceState.STARTING,
    "RUNNING": InstanceState.RUNNING,
    "PAUSED": InstanceState.STOPPED,
    "EXITED": InstanceState.STOPPED,
    "DEAD": InstanceState.STOPPED,
    "TERMINATED": InstanceState.STOPPED,
}
"""Instance state by `desiredStatus` (all values). An evicted pod is EXITED and may be billed until it is terminated."""
_IS_SPOT = {"INTERRUPTABLE": True, "BID": True, "BACKGROUND": True, "RESERVED": False}
_PODS = "query { myself { pods { id name desiredStatus costPerHr gpuCount podType machine { gpuDisplayName } } } }"
_REFUSED = re.compile(
    r"\b(?:unauthorized|unauthenticated|forbidden|invalid api key|(?:status(?: code)?|http|error)[ :=]*40[13])\b", re.I
)
"""Messages for a refused key. A bare 401 does not match, because it may be part of an id."""


class RunpodConfig(Config):
    """Settings of RunPod."""

    endpoint: str | None = None
    """`http://host:port` of a proxy or an emulator. Default: https://api.runpod.io."""
    emulated: bool = False
    """True: the endpoint is an emulator whose machines compute on a CPU and cost nothing."""
    regions: tuple[str, ...] = ()
    """Country codes, e.g. `US`; empty: all."""
    community: bool = False
    """Also use private hosts: they are cheaper, but their owners can read the machine's data."""
    gpu_counts: tuple[int, ...] = (1, 2, 4, 8)
    """Allowed numbers of GPUs per machine."""
    restart_s: float = 600.0
    """Seconds that an eviction costs: the next boot and the work since the last checkpoint. Bids depend on it."""


class RunpodCloud:
    """RunPod implementation of `providers.common.cloud.Cloud`."""

    name = "runpod"
    caps = CAPS
    docker_run = False

    def __init__(
        self, config: RunpodConfig, *, installation: Installation, clock: Clock, env: Mapping[str, str], home: Path
    ) -> None:
        self._config = config
        self._installation = installation
        self._env, self._home = env, home
        self._apis: dict[str, Rest] = {}
        self._market = RunpodMarket(
            self._ask, clock, regions=config.regions, community=config.community,
            counts=config.gpu_counts, restart_s=config.restart_s,
        )  # fmt: skip

    async def rows(self, offer_filter: OfferFilter) -> None:
        await self._market.fill(offer_filter)

    async def list(self) -> Sequence[Observed]:
        """List the installation's pods. Raises OutcomeUnknown for an unreadable pod, because it would seem absent."""
        observed = []
        for pod in await self._pods():
            try:
                name = cluster_of(self._installation, pod["name"])
                if name is not None:
                    observed.append(_observed(Handle(provider="runpod", id=pod["id"], name=name), pod))
            except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as e:
                raise OutcomeUnknown(f"RunPod: a pod of the listing cannot be read: {e!r}") from None
        return observed

    async def destroy(self, handle: Handle) -> None:
        try:
            await self._ask(f'mutation {{ podTerminate(input: {{ podId: "{handle.id}" }}) }}')
        except OutcomeUnknown:
            # RunPod does not document its answer for an absent pod, so list the pods.
            if all(pod["id"] != handle.id for pod in await self._pods()):
                raise Gone(f"RunPod has no pod {handle.id}") from None
            raise

    async def _pods(self) -> Sequence[Mapping[str, Any]]:
        account = (await self._ask(_PODS)).get("myself")
        if not isinstance(account, dict) or not isinstance(account.get("pods"), list):
            raise OutcomeUnknown("RunPod: the answer has no list of pods")
        pods: Sequence[Mapping[str, Any]] = account["pods"]
        return pods

    async def check(self) -> str | None:
        account = (await self._ask("query { myself { id clientBalance } }")).get("myself")
        if not isinstance(account, dict):
            raise OutcomeUnknown("RunPod: the answer does not describe an account")
        balance = account.get("clientBalance")
        try:
            balance_usd = None if balance is None else Decimal(str(balance))
        except ArithmeticError:
            raise OutcomeUnknown(f"RunPod: the account's balance is not a number: {str(balance)[:40]!r}") from None
        if balance_usd is not None and balance_usd < LOW_BALANCE_USD:
            return (
                f"RunPod: the balance is {show(balance_usd)}; add credit at https://www.console.runpod.io/user/billing"
            )
        return None

    async def credential(self) -> str:
        return digest_of(sky_files("runpod", self._env, self._home))

    async def account(self) -> Sequence[str]:
        account = (await self._ask("query { myself { id } }")).get("myself")
        if not isinstance(account, dict) or not account.get("id"):
            raise OutcomeUnknown("RunPod: the answer does not say whose key it is")
        return (str(account["id"]),)

    def purchase(self, offer: Offer, boot: BootSpec) -> Purchase:
        """Return the purchase of an offer, with a catalog row of its own.

        SkyPilot bids the lowest SpotPrice that its catalog has for an instance type in any zone. It reads only the
        first three parts of the type's name, so zone and price are added as further parts. Each purchase thus has its
        own row, and an outdated catalog cannot cause another bid.
        """
        purchase = offer.purchase
        kind = f"{offer.instance_type}_{purchase['zone']}_{purchase['price']}"
        row = {
            "InstanceType": kind,
            **gpu_columns(offer),
            "AcceleratorName": purchase["gpu"],
            "Price": purchase["on_demand"],
            "SpotPrice": purchase["price"] if offer.spot else "",
            "Region": offer.region,
            "AvailabilityZone": purchase["zone"],
        }
        return Purchase(
            cloud="runpod",
            region=offer.region,
            zone=purchase["zone"],
            instance_type=kind,
            use_spot=offer.spot,
            disk_gb=offer.disk_bytes // GB,
            catalog={"runpod/vms.csv": [row]},
        )

    async def confirm(self, handle: Handle, purchase: Purchase) -> None:
        """Do nothing: the listing has all facts that RunPod reports."""

    async def close(self) -> None:
        for api in self._apis.values():
            await api.close()
        self._apis.clear()

    async def _ask(self, query: str) -> Mapping[str, Any]:
        """Run a GraphQL query and return `data`. Reads the key at each call, so a new key needs no restart."""
        key = key_of("runpod", self._env, self._home).key
        if key not in self._apis:
            headers = {"Authorization": f"Bearer {key}", "User-Agent": "gpubroker"}
            self._apis[key] = Rest("RunPod", self._config.endpoint or ENDPOINT, headers, key_help=key_help("runpod"))
        answer = await self._apis[key].call("POST", "/graphql", {"query": query})
        if not isinstance(answer, dict):
            raise OutcomeUnknown("RunPod: the answer is not GraphQL")
        if answer.get("errors"):
            raise _error(answer["errors"])
        data = answer.get("data")
        if not isinstance(data, dict):
            raise OutcomeUnknown("RunPod: the answer has no `data`")
        return data


def _error(errors: Any) -> ProviderError:
    """Return the error of a GraphQL answer, whose status is always 200; an unknown error becomes OutcomeUnknown."""
    first = errors[0] if isinstance(errors, list) and errors else {}
    message = " ".join(str(first.get("message", first) if isinstance(first, dict) else first).split())[:200]
    code = str((first.get("extensions") or {}).get("code", "")) if isinstance(first, dict) else ""
    lower = f"{code} {message}".lower()
    if _REFUSED.search(lower):
        return Rejected(f"RunPod refuses the key ({message}): {key_help('runpod')}")
    if "too many requests" in lower or "rate limit" in lower:
        return Throttled(f"RunPod: {message}")
    if code == "GRAPHQL_VALIDATION_FAILED":
        return Rejected(f"RunPod does not know this query any more: {message}")
    return OutcomeUnknown(f"RunPod: {message}")


def _observed(handle: Handle, pod: Mapping[str, Any]) -> Observed:
    gpu = (pod.get("machine") or {}).get("gpuDisplayName")
    rate = pod.get("costPerHr")
    return Observed(
        handle=handle,
        state=_STATES.get(pod["desiredStatus"], InstanceState.UNKNOWN),
        # RunPod has no A100 of 40 GB, and its display names omit the memory.
        accelerator=accelerator(gpu, 80 * GB if "A100" in gpu else None) if gpu else None,
        gpus=pod.get("gpuCount"),
        spot=_IS_SPOT.get(pod.get("podType") or ""),
        usd_per_hour=usd(str(rate)) if rate else None,
    )

"""RunPod: pods of its own data centres (secure) and of anybody's hosts (community), on demand and by bid.

Everything goes through its GraphQL API (graphql-spec.runpod.io). A pod is made of the image, so nothing runs docker.
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
from providers.common.offer_filter import OfferFilter
from providers.common.skypilot_names import cluster_of, gpu_columns
from providers.runpod.market import RunpodMarket
from trainer.contract.base import Config

ENDPOINT = "https://api.runpod.io"
LITTLE_USD = Decimal(1)
"""A balance below this is worth a word: RunPod rents nothing without an hour's worth (docs.runpod.io/pods/pricing)."""
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
"""Billed by the second (docs.runpod.io/pods/pricing). Lag and boot are assumed.

The SIGTERM 5 s before an eviction goes to the container's first process: that of the trainer's image hands it on. A
stock image has SkyPilot's shell there, and nobody hears.
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
"""All of `desiredStatus`. An evicted pod is EXITED: nothing runs, but it is ours, and may bill, until terminated."""
_KINDS = {"INTERRUPTABLE": True, "BID": True, "BACKGROUND": True, "RESERVED": False}
_PODS = "query { myself { pods { id name desiredStatus costPerHr gpuCount podType machine { gpuDisplayName } } } }"
_REFUSED = re.compile(
    r"\b(?:unauthorized|unauthenticated|forbidden|invalid api key|(?:status(?: code)?|http|error)[ :=]*40[13])\b", re.I
)
"""Words of a refused key; a bare 401 may be a part of any id."""


class RunpodConfig(Config):
    """RunPod."""

    endpoint: str | None = None
    """`http://host:port` of a proxy or an emulator in place of https://api.runpod.io."""
    emulated: bool = False
    """The endpoint is an emulator: its machines compute on a CPU and nothing costs money."""
    regions: tuple[str, ...] = ()
    """Country codes, e.g. `US`; empty: all."""
    community: bool = False
    """Also anybody's hosts, which are cheaper and whose owners can look into the machine."""
    gpu_counts: tuple[int, ...] = (1, 2, 4, 8)
    """How many GPUs a machine may have."""
    restart_s: float = 600.0
    """What an eviction costs: the time to boot again and the work since the last checkpoint. Bids follow from it."""


class RunpodCloud:
    """`providers.common.cloud.Cloud` of RunPod."""

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

    async def rows(self, sieve: OfferFilter) -> None:
        await self._market.fill(sieve)

    async def list(self) -> Sequence[Observed]:
        """Every pod of the account is looked at: one that cannot be read would otherwise pass for absent."""
        seen = []
        for pod in await self._pods():
            try:
                name = cluster_of(self._installation, pod["name"])
                if name is not None:
                    seen.append(_observed(Handle(provider="runpod", id=pod["id"], name=name), pod))
            except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as e:
                raise OutcomeUnknown(f"RunPod: a pod of the listing cannot be read: {e!r}") from None
        return seen

    async def destroy(self, handle: Handle) -> None:
        try:
            await self._ask(f'mutation {{ podTerminate(input: {{ podId: "{handle.id}" }}) }}')
        except OutcomeUnknown:
            # What RunPod says of a pod that is gone is not documented, so look.
            if all(pod["id"] != handle.id for pod in await self._pods()):
                raise Gone(f"RunPod has no pod {handle.id}") from None
            raise

    async def _pods(self) -> Sequence[Mapping[str, Any]]:
        found = (await self._ask(_PODS)).get("myself")
        if not isinstance(found, dict) or not isinstance(found.get("pods"), list):
            raise OutcomeUnknown("RunPod: the listing of pods is not one")
        pods: Sequence[Mapping[str, Any]] = found["pods"]
        return pods

    async def check(self) -> str | None:
        me = (await self._ask("query { myself { id clientBalance } }")).get("myself")
        if not isinstance(me, dict):
            raise OutcomeUnknown("RunPod: the answer does not describe an account")
        balance = me.get("clientBalance")
        try:
            left = None if balance is None else Decimal(str(balance))
        except ArithmeticError:
            raise OutcomeUnknown(f"RunPod: the account's balance is no number: {str(balance)[:40]!r}") from None
        if left is not None and left < LITTLE_USD:
            return f"RunPod: the balance is {show(left)}; add credit at https://www.console.runpod.io/user/billing"
        return None

    async def credential(self) -> str:
        return digest_of(sky_files("runpod", self._env, self._home))

    async def account(self) -> Sequence[str]:
        me = (await self._ask("query { myself { id } }")).get("myself")
        if not isinstance(me, dict) or not me.get("id"):
            raise OutcomeUnknown("RunPod: the answer does not say whose key it is")
        return (str(me["id"]),)

    def purchase(self, offer: Offer, boot: BootSpec) -> Purchase:
        """SkyPilot bids the least SpotPrice that its catalog has for an instance type, in whatever zone.

        It reads the first three parts of the type's name alone, so zone and price go into further ones: each purchase
        has a row of its own, and a catalog that is out of date cannot mean another bid.
        """
        bought = offer.purchase
        kind = f"{offer.instance_type}_{bought['zone']}_{bought['price']}"
        row = {
            "InstanceType": kind,
            **gpu_columns(offer),
            "AcceleratorName": bought["gpu"],
            "Price": bought["on_demand"],
            "SpotPrice": bought["price"] if offer.spot else "",
            "Region": offer.region,
            "AvailabilityZone": bought["zone"],
        }
        return Purchase(
            cloud="runpod",
            region=offer.region,
            zone=bought["zone"],
            instance_type=kind,
            use_spot=offer.spot,
            disk_gb=offer.disk_bytes // GB,
            catalog={"runpod/vms.csv": [row]},
        )

    async def confirm(self, handle: Handle, purchase: Purchase) -> None:
        """The listing says all that RunPod knows."""

    async def close(self) -> None:
        for api in self._apis.values():
            await api.close()
        self._apis.clear()

    async def _ask(self, query: str) -> Mapping[str, Any]:
        """`data` of the answer. The key is read anew, so that a new one is taken up without a restart."""
        key = key_of("runpod", self._env, self._home).key
        if key not in self._apis:
            headers = {"Authorization": f"Bearer {key}", "User-Agent": "gpubroker"}
            self._apis[key] = Rest("RunPod", self._config.endpoint or ENDPOINT, headers, key_help=key_help("runpod"))
        answer = await self._apis[key].call("POST", "/graphql", {"query": query})
        if not isinstance(answer, dict):
            raise OutcomeUnknown("RunPod: the answer is no GraphQL")
        if answer.get("errors"):
            raise _error(answer["errors"])
        data = answer.get("data")
        if not isinstance(data, dict):
            raise OutcomeUnknown("RunPod: the answer has no `data`")
        return data


def _error(errors: Any) -> ProviderError:
    """GraphQL answers 200 to everything; what is not recognised may have happened."""
    first = errors[0] if isinstance(errors, list) and errors else {}
    said = " ".join(str(first.get("message", first) if isinstance(first, dict) else first).split())[:200]
    code = str((first.get("extensions") or {}).get("code", "")) if isinstance(first, dict) else ""
    lower = f"{code} {said}".lower()
    if _REFUSED.search(lower):
        return Rejected(f"RunPod refuses the key ({said}): {key_help('runpod')}")
    if "too many requests" in lower or "rate limit" in lower:
        return Throttled(f"RunPod: {said}")
    if code == "GRAPHQL_VALIDATION_FAILED":
        return Rejected(f"RunPod does not know this query any more: {said}")
    return OutcomeUnknown(f"RunPod: {said}")


def _observed(handle: Handle, pod: Mapping[str, Any]) -> Observed:
    gpu = (pod.get("machine") or {}).get("gpuDisplayName")
    rate = pod.get("costPerHr")
    return Observed(
        handle=handle,
        state=_STATES.get(pod["desiredStatus"], InstanceState.UNKNOWN),
        # RunPod has no A100 of 40 GB, and its display names leave the memory out.
        accelerator=accelerator(gpu, 80 * GB if "A100" in gpu else None) if gpu else None,
        gpus=pod.get("gpuCount"),
        spot=_KINDS.get(pod.get("podType") or ""),
        usd_per_hour=usd(str(rate)) if rate else None,
    )

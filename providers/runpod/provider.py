"""RunPod provider: pods in data centres (secure) and on private hosts (community), on demand and by bid.

REST v2 prices, lists and destroys; see `providers.runpod.api` for the dates. GraphQL, while it answers, gives bids,
the balance and the account's id, and is the second way to list and destroy. A pod runs the image itself.
"""

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from urllib.parse import quote

from broker.domain.errors import Gone, OutcomeUnknown, ProviderError, Rejected, Throttled
from broker.domain.ids import Installation
from broker.domain.instance import BootSpec, Caps, Observed
from broker.domain.job import Handle
from broker.domain.money import format_usd
from broker.domain.offer import Offer
from broker.ports import Clock
from providers.common.cloud import Purchase
from providers.common.credentials import digest_of, sky_files, source_of
from providers.common.gpu_names import GB
from providers.common.machine_task import CUDA_FLOOR
from providers.common.market_rules import OfferFilter
from providers.common.skypilot_names import cluster_of, gpu_columns
from providers.runpod import pods
from providers.runpod.api import ENDPOINT, GRAPHQL, REST, ApiRetired, PodNotFound, RunpodApi
from providers.runpod.market import RunpodMarket
from providers.skypilot.plugin.shared import SKY_VERSION
from trainer.contract.base import Config, matching

__all__ = ["ENDPOINT", "RunpodCloud", "RunpodConfig"]

GRAPHQL_SKY_VERSIONS = frozenset({"0.14.1"})
"""SkyPilot versions that create pods by GraphQL. Its pull request 10846 (open on 2026-09-22) creates by REST v2."""
LOW_BALANCE_USD = Decimal(1)
"""Dollars of balance below which `check` warns. RunPod requires an hour's cost (docs.runpod.io/pods/pricing)."""
CAPS = Caps(
    spot=True,
    images=True,
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


class RunpodConfig(Config):
    """Settings of RunPod."""

    endpoint: str | None = None
    """`http://host:port` of a proxy or an emulator. Default: https://api.runpod.io."""
    emulated: bool = False
    """true: the endpoint is an emulator whose machines compute on a CPU and cost nothing."""
    regions: tuple[str, ...] = ()
    """Country codes, e.g. `US`; empty: all."""
    community: bool = False
    """Include private hosts, which are cheaper, but whose owners can read the machine's data."""
    gpu_counts: tuple[int, ...] = (1, 2, 4, 8)
    """Allowed numbers of GPUs per machine."""
    cuda_min: str = matching(r"^\d+\.\d+$", "must be a CUDA version such as 12.4", default=CUDA_FLOOR)
    """CUDA version that the image needs, e.g. `12.4`; hosts with an older driver are excluded."""
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
        self._api = RunpodApi(config.endpoint, env, home)
        self._market = RunpodMarket(
            self._api, clock, regions=config.regions, community=config.community, counts=config.gpu_counts,
            restart_s=config.restart_s, cuda_min=config.cuda_min,
        )  # fmt: skip

    async def rows(self, offer_filter: OfferFilter) -> None:
        await self._market.fill(offer_filter)
        if GRAPHQL in self._api.retired and SKY_VERSION in GRAPHQL_SKY_VERSIONS:
            raise Rejected(_no_purchase_message())

    async def list(self) -> Sequence[Observed]:
        """List the installation's pods. Raises OutcomeUnknown for an unreadable pod, because it would seem absent.

        A retired REST v2 proves nothing, so GraphQL lists. Raises OutcomeUnknown if neither gives a whole listing.
        """
        try:
            listed, by_rest = await self._api.pods(), True
        except ApiRetired as e:
            listed, by_rest = await self._graphql_pods(e), False
        observed = []
        for pod in listed:
            try:
                name = cluster_of(self._installation, pod["name"])
                if name is not None:
                    handle = Handle(provider="runpod", id=pod["id"], name=name)
                    observed.append(
                        pods.observed(handle, pod, cuda_min=self._config.cuda_min)
                        if by_rest
                        else pods.graphql_observed(handle, pod)
                    )
            except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as e:
                raise OutcomeUnknown(f"RunPod: a pod of the listing cannot be read: {e!r}") from None
        return observed

    async def destroy(self, handle: Handle) -> None:
        """Terminate a pod by REST v2, or by GraphQL if that fails. Both may be sent, because an id is used once.

        Raises Gone only if a complete listing lacks the pod.
        """
        try:
            await self._api.rest("DELETE", f"/pods/{quote(handle.id, safe='')}")
        except Throttled:
            raise
        except ProviderError as e:
            await self._destroy_otherwise(handle, e)

    async def _destroy_otherwise(self, handle: Handle, problem: ProviderError) -> None:
        """Terminate by GraphQL what REST v2 did not terminate. Raises Gone, or `problem` if GraphQL fails too."""
        if isinstance(problem, PodNotFound) and await self._is_absent(handle):
            raise Gone(f"RunPod has no pod {handle.id}") from None
        try:
            await self._api.graphql(f"mutation {{ podTerminate(input: {{ podId: {json.dumps(handle.id)} }}) }}")
        except ProviderError as e:
            # RunPod does not document its answer for an absent pod, so list the pods.
            if isinstance(e, OutcomeUnknown) and await self._is_absent(handle):
                raise Gone(f"RunPod has no pod {handle.id}") from None
            raise type(problem)(f"{problem}; by GraphQL: {e}") from None

    async def _is_absent(self, handle: Handle) -> bool:
        """Return True only if a complete listing lacks the pod."""
        try:
            try:
                listed = await self._api.pods()
            except ApiRetired as e:
                listed = await self._graphql_pods(e)
        except ProviderError:
            return False
        return all(pod["id"] != handle.id for pod in listed)

    async def _graphql_pods(self, problem: ApiRetired) -> Sequence[Mapping[str, object]]:
        try:
            return await self._api.graphql_pods(pods.GRAPHQL_PODS)
        except ProviderError as e:
            raise OutcomeUnknown(f"{problem}; by GraphQL: {e}; which pods exist is unknown") from None

    async def check(self) -> str | None:
        """Return a problem with the balance, the key or a retired API. Raises the errors of `list`."""
        try:
            await self._api.pods()
        except ApiRetired as e:
            return f"{e}; pods are listed and ended by GraphQL, nothing is bought: update gpubroker"
        try:
            account = (await self._api.graphql("query { myself { id clientBalance } }")).get("myself")
        except ApiRetired:
            return _no_purchase_message() if SKY_VERSION in GRAPHQL_SKY_VERSIONS else None
        if not isinstance(account, dict):
            raise OutcomeUnknown("RunPod: the answer does not describe an account")
        balance = account.get("clientBalance")
        try:
            balance_usd = None if balance is None else Decimal(str(balance))
        except ArithmeticError:
            raise OutcomeUnknown(f"RunPod: the account's balance is not a number: {str(balance)[:40]!r}") from None
        if balance_usd is not None and balance_usd < LOW_BALANCE_USD:
            return f"RunPod: the balance is {format_usd(balance_usd)}; add credit at https://www.console.runpod.io/user/billing"
        return None

    def source(self) -> str:
        return source_of("runpod", self._env, self._home)

    async def credential(self) -> str:
        return digest_of(sky_files("runpod", self._env, self._home))

    async def account(self) -> Sequence[str]:
        """Return the account's id and a mark of the key.

        REST v2 has no route to the account's id (OpenAPI document of 2026-08-20). Once GraphQL is retired, the same
        key proves the same account, and a new key must be confirmed by the operator.
        """
        mark = self._api.key_mark()
        try:
            account = (await self._api.graphql("query { myself { id } }")).get("myself")
        except ApiRetired:
            return (mark,)
        if not isinstance(account, dict) or not account.get("id"):
            raise OutcomeUnknown("RunPod: the answer does not say whose key it is")
        return (str(account["id"]), mark)

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
            pin={"cuda_min": self._config.cuda_min, "cuda": purchase.get("cuda", "")},
        )

    async def confirm(self, handle: Handle, purchase: Purchase) -> None:
        """Do nothing: the listing has all facts that RunPod reports."""

    async def close(self) -> None:
        await self._api.close()


def _no_purchase_message() -> str:
    return (
        f"RunPod has retired {GRAPHQL}, by which SkyPilot {SKY_VERSION} creates pods: install a SkyPilot that creates "
        f"them by {REST} (docs/guide/clouds.md); running pods are still listed and ended"
    )

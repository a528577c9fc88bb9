"""Vast: a market of single machines, most of them anybody's, on demand and by bid.

Its REST API (docs.vast.ai/api-reference). An ask is one machine, or a part of one, so each is an offer of its own and
is bought by its number. An instance is made of the image, so nothing runs docker.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from broker.domain.errors import Gone, OutcomeUnknown, ProviderError, Rejected
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
from providers.common.image_errors import IMAGE_FIX, image_refused
from providers.common.offer_filter import OfferFilter
from providers.common.skypilot_names import cluster_of, gpu_columns
from providers.vast.market import CUT, GPUS, MIB, VastMarket, Wanted, country
from trainer.contract.base import Config

ENDPOINT = "https://console.vast.ai"
LITTLE_USD = Decimal(1)
PAGE, PAGES = 25, 100
"""The most instances that a page of a listing holds, and the most pages that are believed."""
CAPS = Caps(
    spot=True,
    list_lag_s=10.0,
    teardown_s=10.0,
    boot_s=180.0,
    trust="community",
    # Each instance has a key of its own that can stop and destroy it: CONTAINER_API_KEY, with CONTAINER_ID
    # (docs.vast.ai/guides/instances/docker-environment, "Using the CLI from Inside an Instance"). See run.sh.
    self_stop="instance_key",
    agent_start_s=120.0,
)
"""Billed by the second (docs.vast.ai/guides/instances/pricing). Lag and boot are assumed. Eviction has no notice."""
_STARTING = frozenset({"created", "loading", "rebooting", "recycling", "scheduling"})
_STOPPED = frozenset({"stopped", "frozen", "exited", "offline"})
"""An outbid instance is stopped; it goes on costing its disk, and would come back by itself: ours until destroyed."""


_ABSENT = re.compile(r"no_such_instance|\binstance\b[^.]*\bnot found", re.I)
_REFUSED = re.compile(r"auth|api.?key|permission|forbidden", re.I)


class VastConfig(Config):
    """Vast.ai."""

    endpoint: str | None = None
    """`http://host:port` of a proxy or an emulator in place of https://console.vast.ai."""
    emulated: bool = False
    """The endpoint is an emulator: its machines compute on a CPU and nothing costs money."""
    regions: tuple[str, ...] = ()
    """Country codes, e.g. `DE`; empty: all."""
    community: bool = True
    """Also hosts outside of data centres, whose owners can look into the machine."""
    verified: bool = True
    """Only machines that Vast has verified."""
    min_reliability: float = 0.9
    """0..1 as Vast states it; a host below is left out."""
    cuda_min: str = "12.4"
    """What the image needs of the driver; a host that runs only older CUDA is left out."""
    restart_s: float = 600.0
    """What an eviction costs: the time to boot again and the work since the last checkpoint. Bids follow from it."""


class VastCloud:
    """`providers.common.cloud.Cloud` of Vast."""

    name = "vast"
    caps = CAPS
    docker_run = False

    def __init__(
        self, config: VastConfig, *, installation: Installation, clock: Clock, env: Mapping[str, str], home: Path
    ) -> None:
        self._config = config
        self._installation = installation
        self._env, self._home = env, home
        self._apis: dict[str, Rest] = {}
        wanted = Wanted(
            regions=config.regions, community=config.community, verified=config.verified,
            min_reliability=config.min_reliability, cuda_min=config.cuda_min, restart_s=config.restart_s,
        )  # fmt: skip
        self._market = VastMarket(wanted, clock)

    async def rows(self, sieve: OfferFilter) -> None:
        """One search, and where its answer was cut off, one more for each GPU that the broker knows."""
        asks = await self._search(self._market.query())
        if len(asks) == CUT:
            for gpu in GPUS:
                asks += await self._search(self._market.query(gpu))
        await self._market.fill(sieve, asks)

    async def _search(self, query: Mapping[str, Any]) -> list[Any]:
        offers = (await self._ask("POST", "/api/v0/bundles/", query)).get("offers")
        if not isinstance(offers, list):
            raise OutcomeUnknown("Vast: the answer to a search has no `offers`")
        return offers

    async def list(self) -> Sequence[Observed]:
        """Every instance of the account is looked at: one that cannot be read would otherwise pass for absent."""
        seen = []
        for machine in await self._instances():
            try:
                name = cluster_of(self._installation, machine["label"])
                if name is not None:
                    seen.append(_observed(name, machine))
            except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as e:
                raise OutcomeUnknown(f"Vast: an instance of the listing cannot be read: {e!r}") from None
        return seen

    async def _instances(self) -> Sequence[Mapping[str, Any]]:
        """All pages; the older unpaged call is refused to new accounts. Raises OutcomeUnknown when some are missing."""
        found: dict[Any, Mapping[str, Any]] = {}
        query = {"limit": str(PAGE)}
        for _ in range(PAGES):
            answer = await self._ask("GET", "/api/v1/instances/", query=query)
            instances = answer.get("instances")
            if not isinstance(instances, list):
                raise OutcomeUnknown("Vast: the listing has no `instances`")
            if not all(isinstance(machine, dict) and "id" in machine for machine in instances):
                raise OutcomeUnknown("Vast: an instance of the listing cannot be read: it has no id")
            found |= {machine["id"]: machine for machine in instances}
            token = answer.get("next_token")
            if not token:
                break
            query = {"limit": str(PAGE), "after_token": str(token)}
        total = answer.get("total_instances")
        if token or (isinstance(total, int) and total > len(found)):
            raise OutcomeUnknown(f"Vast: the listing shows {len(found)} of {total} instances")
        return list(found.values())

    async def destroy(self, handle: Handle) -> None:
        answer = await self._call("DELETE", f"/api/v0/instances/{handle.id}/", {})
        if answer.get("success") is not True:
            said = _said(answer)
            if _ABSENT.search(said):
                raise Gone(f"Vast has no instance {handle.id}")
            raise OutcomeUnknown(f"Vast: instance {handle.id} was not destroyed: {said or 'no reason given'}")

    async def check(self) -> str | None:
        """The answer holds the account's key too: nothing of it but the balance is looked at."""
        me = await self._ask("GET", "/api/v0/users/current/")
        credit = me.get("credit")
        try:
            left = None if credit is None else Decimal(str(credit))
        except ArithmeticError:
            raise OutcomeUnknown(f"Vast: the account's credit is no number: {str(credit)[:40]!r}") from None
        if left is None and "id" not in me:
            raise OutcomeUnknown("Vast: the answer does not describe an account")
        if left is not None and left < LITTLE_USD:
            return f"Vast: the credit is {show(left)}; add some at https://cloud.vast.ai/billing/"
        return None

    async def credential(self) -> str:
        return digest_of(sky_files("vast", self._env, self._home))

    async def account(self) -> Sequence[str]:
        me = (await self._ask("GET", "/api/v0/users/current/")).get("id")
        if me is None:
            raise OutcomeUnknown("Vast: the answer does not say whose key it is")
        return (str(me),)

    def purchase(self, offer: Offer, boot: BootSpec) -> Purchase:
        """SkyPilot reads the first two parts and the last of the type's name; the ask goes between them.

        So each ask has a row of its own, and two prices of one type never meet. A bid must be given outright, since
        SkyPilot would send the null of an on-demand search.
        """
        bought = offer.purchase
        first, gpu, cores, ram = offer.instance_type.split("-")
        kind = f"{first}-{gpu}-{cores}-{bought['ask']}-{ram}"
        row = {
            "InstanceType": kind,
            **gpu_columns(offer),
            "Price": f"{offer.on_demand_usd_per_hour or offer.usd_per_hour:f}",
            "SpotPrice": f"{offer.usd_per_hour:f}" if offer.spot else "",
            "Region": offer.region,
        }
        price = {"vast": {"create_instance_kwargs": {"price": float(bought["bid"])}}} if offer.spot else {}
        return Purchase(
            cloud="vast",
            region=offer.region,
            instance_type=kind,
            use_spot=offer.spot,
            disk_gb=offer.disk_bytes // GB,
            catalog={"vast/vms.csv": [row]},
            config=price,
            pin={"ask": bought["ask"], "machine": bought["machine"]},
        )

    async def confirm(self, handle: Handle, purchase: Purchase) -> None:
        """The listing says all that Vast knows."""

    async def close(self) -> None:
        for api in self._apis.values():
            await api.close()
        self._apis.clear()

    async def _ask(
        self, method: str, path: str, body: Any = None, *, query: Mapping[str, str] | None = None
    ) -> Mapping[str, Any]:
        """The answer to what only reads: what Vast says beside an error of its own is none."""
        answer = await self._call(method, path, body, query=query)
        if answer.get("success") is False or answer.get("error"):
            raise _error(f"Vast: {method} {path}", _said(answer))
        return answer

    async def _call(
        self, method: str, path: str, body: Any = None, *, query: Mapping[str, str] | None = None
    ) -> Mapping[str, Any]:
        """The answer. The key is read anew, so that a new one is taken up without a restart."""
        key = key_of("vast", self._env, self._home).key
        if key not in self._apis:
            headers = {"Authorization": f"Bearer {key}"}
            endpoint = self._config.endpoint or ENDPOINT
            self._apis[key] = Rest("Vast", endpoint, headers, key_help=key_help("vast"), absent=_ABSENT)
        answer = await self._apis[key].call(method, path, body, query=query)
        if not isinstance(answer, dict):
            raise OutcomeUnknown(f"Vast: {method} {path}: the answer is no object")
        return answer


def _said(answer: Mapping[str, Any]) -> str:
    return " ".join(f"{answer.get('error') or ''} {answer.get('msg') or ''}".split())[:200]


def _error(what: str, said: str) -> ProviderError:
    if _REFUSED.search(said):
        return Rejected(f"Vast refuses the key ({said}): {key_help('vast')}")
    return OutcomeUnknown(f"{what}: {said or 'it failed, and no reason is given'}")


def _fault(machine: Mapping[str, Any]) -> str | None:
    """The host's docker says why there is no container, and goes on trying for as long as the machine is paid for."""
    said = " ".join(str(machine.get("status_msg") or "").split())[:300]
    if machine.get("actual_status") == "running" or not image_refused(said):
        return None
    return f"the image cannot be pulled: {said}; {IMAGE_FIX}"


def _observed(name: Any, machine: Mapping[str, Any]) -> Observed:
    gpu, memory, rate, bids = (machine.get(key) for key in ("gpu_name", "gpu_ram", "dph_total", "is_bid"))
    memory_bytes = int(memory) * MIB if memory else None
    return Observed(
        handle=Handle(
            provider="vast", id=str(machine["id"]), name=name, region=country(machine.get("geolocation")) or ""
        ),
        state=_state(machine),
        accelerator=accelerator(gpu, memory_bytes) if gpu else None,
        gpus=machine.get("num_gpus"),
        gpu_memory_bytes=memory_bytes,
        spot=bids if isinstance(bids, bool) else None,
        usd_per_hour=usd(str(rate)) if rate else None,
        fault=_fault(machine),
        created_at=_since(machine.get("start_date")),
    )


def _since(seconds: Any) -> datetime | None:
    """Of the epoch; a machine whose age cannot be read is a machine all the same."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _state(machine: Mapping[str, Any]) -> InstanceState:
    """`actual_status` is the container's, null before there is one; the other two tell what Vast wants of it."""
    actual = machine.get("actual_status")
    if actual in _STOPPED or "stopped" in (machine.get("intended_status"), machine.get("cur_state")):
        return InstanceState.STOPPED
    if actual == "running":
        return InstanceState.RUNNING
    return InstanceState.STARTING if actual is None or actual in _STARTING else InstanceState.UNKNOWN

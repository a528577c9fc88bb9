"""Vast provider: a market of single machines, most of them on private hosts, on demand and by bid.

All calls use its REST API (docs.vast.ai/api-reference). An ask is one machine or a part of one, so each ask is a
separate offer and is purchased by its number. An instance runs the image itself, so no `docker run` is needed.
"""

import re
from collections.abc import Awaitable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from broker.domain.errors import Gone, OutcomeUnknown, ProviderError, Rejected
from broker.domain.ids import Installation
from broker.domain.instance import BootSpec, Caps, InstanceState, Observed
from broker.domain.job import Handle
from broker.domain.money import format_usd, usd
from broker.domain.offer import Offer
from broker.ports import Clock
from providers.common.call_rates import CallLimit, CallRates, RateClock
from providers.common.cloud import Purchase
from providers.common.cloud_values import as_integer, flag, moment, positive, text
from providers.common.credentials import digest_of, key_help, key_of, sky_files, source_of
from providers.common.gpu_names import GB, accelerator
from providers.common.http_json import Rest
from providers.common.machine_task import CUDA_FLOOR, IMAGE_FIX, cannot_start, image_refused
from providers.common.market_rules import OfferFilter
from providers.common.skypilot_names import cluster_of, gpu_columns
from providers.skypilot.plugin.call_turns import address_folder, slots_folder
from providers.vast.market import GPUS, MIB, TRUNCATED_AT, AskFilter, VastMarket, country
from providers.vast.searches import SearchCache
from trainer.contract.base import Config, matching

ENDPOINT = "https://console.vast.ai"
LOW_BALANCE_USD = Decimal(1)
PAGE, PAGES = 25, 100
"""Largest number of instances per page of a listing, and largest number of pages that are read."""
PAGE_TRIES = 6
"""Calls for one page of a listing. A page that is refused is repeated, because a partial listing proves nothing."""
LAUNCH_INTERVAL_S = 4.5
"""Seconds between two creates (vast-ai/docs api-reference/openapi/yaml/create_instance.yaml, read 2026-11-28)."""
LIMITS = {
    "search": CallLimit(
        calls=10, per_s=60.0, longest_wait_s=0.0, source="search_offers.yaml: 10 requests a minute and address"
    ),
    "listing": CallLimit(
        calls=1,
        per_s=1.2,
        longest_wait_s=20.0,
        penalty_s=1.0,
        source="show_instances.yaml: 1 s between two requests; the rest is for delays of the network",
    ),
    "destroy": CallLimit(
        calls=1, per_s=3.0, longest_wait_s=10.0, source="auto_delete_api_v0_instances_id.yaml: x-rateLimit 3"
    ),
}
"""Limits of Vast's API (vast-ai/docs, api-reference/openapi/yaml and rate-limits-and-errors.mdx, read 2026-11-28).

SkyPilot's server makes calls of the same account, so both take their slots from one store.
A refusal is a 429 in plain text without Retry-After.
"""
RESERVED_SEARCHES = 2
"""Searches a minute that are left for the next polls and for other programs of the account."""
CAPS = Caps(
    spot=True,
    images=True,
    list_lag_s=10.0,
    teardown_s=10.0,
    boot_s=180.0,
    trust="community",
    # Each instance has a key of its own that can stop and destroy it: CONTAINER_API_KEY, with CONTAINER_ID
    # (docs.vast.ai/guides/instances/docker-environment, "Using the CLI from Inside an Instance"). See run.sh.
    self_stop="instance_key",
    calls_per_s=1.0,
    agent_start_s=120.0,
)
"""Capabilities of Vast; billed by the second (docs.vast.ai/guides/instances/pricing).

Lag and boot are assumed. An eviction comes without notice.
"""
_STARTING = frozenset({"created", "loading", "rebooting", "recycling", "scheduling"})
_STOPPED = frozenset({"stopped", "frozen", "exited", "offline"})
"""Statuses of a stopped instance. An outbid instance is stopped, costs its disk, and may restart until destroyed."""
_ABSENT = re.compile(r"no_such_instance|\binstance\b[^.]*\bnot found", re.I)
_REFUSED = re.compile(r"auth|api.?key|permission|forbidden", re.I)


class VastConfig(Config):
    """Settings of Vast.ai."""

    endpoint: str | None = None
    """`http://host:port` of a proxy or an emulator. Default: https://console.vast.ai."""
    emulated: bool = False
    """true: the endpoint is an emulator whose machines compute on a CPU and cost nothing."""
    regions: tuple[str, ...] = ()
    """Country codes, e.g. `DE`; empty: all."""
    community: bool = True
    """Include hosts outside of data centres, whose owners can read the machine's data."""
    verified: bool = True
    """Use only machines that Vast has verified."""
    min_reliability: float = 0.9
    """Smallest accepted host reliability by Vast's statistics, 0..1."""
    cuda_min: str = matching(r"^\d+\.\d+$", "must be a CUDA version such as 12.4", default=CUDA_FLOOR)
    """CUDA version that the image needs; hosts whose driver supports only older versions are excluded."""
    restart_s: float = 600.0
    """Seconds that an eviction costs: the next boot and the work since the last checkpoint. Bids depend on it."""


class VastCloud:
    """Vast implementation of `providers.common.cloud.Cloud`."""

    name = "vast"
    caps = CAPS
    docker_run = False

    def __init__(
        self, config: VastConfig, *, installation: Installation, clock: Clock, env: Mapping[str, str], home: Path,
        rate_clock: RateClock | None = None,
    ) -> None:  # fmt: skip
        """`rate_clock`: clock by which calls wait for the limits of the API; None: the event loop's."""
        self._config = config
        self._installation = installation
        self._env, self._home = env, home
        self._apis: dict[str, Rest] = {}
        ask_filter = AskFilter(
            regions=config.regions, community=config.community, verified=config.verified,
            min_reliability=config.min_reliability, cuda_min=config.cuda_min, restart_s=config.restart_s,
        )  # fmt: skip
        self._market = VastMarket(ask_filter, clock)
        folder = address_folder(slots_folder(home), config.endpoint or ENDPOINT)
        self._rates = CallRates("Vast", LIMITS, rate_clock, folder)
        self._searches = SearchCache(clock, self._search)

    async def rows(self, offer_filter: OfferFilter) -> None:
        """Add the offers of one search; after a truncated answer, also of searches per GPU in `GPUS`.

        Vast accepts few searches a minute, so each poll repeats the oldest ones, and the others keep their answers.
        """
        answers = [await self._searches.get(None, self._market.query())]
        if len(answers[0].rows) == TRUNCATED_AT:
            queries = {gpu: self._market.query(gpu) for gpu in GPUS}
            answers += await self._searches.get_some(queries, self._rates.free("search") - RESERVED_SEARCHES)
        await self._market.fill(offer_filter, answers)

    async def _search(self, query: Mapping[str, Any]) -> list[Any]:
        answer = await self._rates.call("search", lambda: self._read("POST", "/api/v0/bundles/", query))
        offers = answer.get("offers")
        if not isinstance(offers, list):
            raise OutcomeUnknown("Vast: the answer to a search has no `offers`")
        return offers

    async def list(self) -> Sequence[Observed]:
        """List the installation's instances.

        Raises OutcomeUnknown for an unreadable instance, because it would seem absent.
        """
        observed = []
        for machine in await self._instances():
            try:
                name = cluster_of(self._installation, machine["label"])
                if name is not None:
                    observed.append(_observed(name, machine))
            except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as e:
                raise OutcomeUnknown(f"Vast: an instance of the listing cannot be read: {e!r}") from None
        return observed

    async def _instances(self) -> Sequence[Mapping[str, Any]]:
        """Return the instances of all pages. Raises OutcomeUnknown if some are missing.

        Vast refuses the older call without pages to new accounts.
        """
        by_id: dict[str, Mapping[str, Any]] = {}
        query = {"limit": str(PAGE)}
        for _ in range(PAGES):
            answer = await self._page(query)
            instances = answer.get("instances")
            if not isinstance(instances, list):
                raise OutcomeUnknown("Vast: the listing has no `instances`")
            for machine in instances:
                if not isinstance(machine, dict) or (machine_id := text(machine.get("id"))) is None:
                    raise OutcomeUnknown("Vast: an instance of the listing cannot be read: it has no id")
                by_id[machine_id] = machine
            token = _next_token(answer)
            if token is None or token == query.get("after_token"):
                break
            query = {"limit": str(PAGE), "after_token": token}
        total = as_integer(answer.get("total_instances"))
        if token is not None or (total is not None and total > len(by_id)):
            raise OutcomeUnknown(f"Vast: the listing shows {len(by_id)} of {total} instances")
        return list(by_id.values())

    async def _page(self, query: Mapping[str, str]) -> Mapping[str, Any]:
        def send() -> Awaitable[Mapping[str, Any]]:
            return self._read("GET", "/api/v1/instances/", query=query)

        return await self._rates.call("listing", send, tries=PAGE_TRIES)

    async def destroy(self, handle: Handle) -> None:
        def send() -> Awaitable[Mapping[str, Any]]:
            return self._call("DELETE", f"/api/v0/instances/{handle.id}/", {})

        answer = await self._rates.call("destroy", send)
        if flag(answer.get("success")) is not True:
            message = _error_text(answer)
            if _ABSENT.search(message):
                raise Gone(f"Vast has no instance {handle.id}")
            raise OutcomeUnknown(f"Vast: instance {handle.id} was not destroyed: {message or 'no reason given'}")

    async def check(self) -> str | None:
        """Check the account's credit. The answer also contains the account's key, so it must not be logged."""
        account = await self._read("GET", "/api/v0/users/current/")
        credit = account.get("credit")
        try:
            credit_usd = None if credit is None else Decimal(str(credit))
        except ArithmeticError:
            raise OutcomeUnknown(f"Vast: the account's credit is not a number: {str(credit)[:40]!r}") from None
        if credit_usd is None and "id" not in account:
            raise OutcomeUnknown("Vast: the answer does not describe an account")
        if credit_usd is not None and credit_usd < LOW_BALANCE_USD:
            return f"Vast: the credit is {format_usd(credit_usd)}; add some at https://cloud.vast.ai/billing/"
        return None

    def source(self) -> str:
        return source_of("vast", self._env, self._home)

    async def credential(self) -> str:
        return digest_of(sky_files("vast", self._env, self._home))

    async def account(self) -> Sequence[str]:
        account_id = (await self._read("GET", "/api/v0/users/current/")).get("id")
        if account_id is None:
            raise OutcomeUnknown("Vast: the answer does not say whose key it is")
        return (str(account_id),)

    def purchase(self, offer: Offer, boot: BootSpec) -> Purchase:
        """Return the purchase of an ask, with a catalog row of its own.

        SkyPilot reads the first two parts and the last part of the type's name, so the ask's number is put between
        them. Two prices of one type therefore never share a row. The bid is passed explicitly, because SkyPilot would
        send the null bid of its on-demand search.
        """
        purchase = offer.purchase
        first, gpu, cores, ram = offer.instance_type.split("-")
        kind = f"{first}-{gpu}-{cores}-{purchase['ask']}-{ram}"
        row = {
            "InstanceType": kind,
            **gpu_columns(offer),
            "Price": f"{offer.on_demand_usd_per_hour or offer.usd_per_hour:f}",
            "SpotPrice": f"{offer.usd_per_hour:f}" if offer.spot else "",
            "Region": offer.region,
        }
        price = {"vast": {"create_instance_kwargs": {"price": float(purchase["bid"])}}} if offer.spot else {}
        return Purchase(
            cloud="vast",
            region=offer.region,
            instance_type=kind,
            use_spot=offer.spot,
            disk_gb=offer.disk_bytes // GB,
            catalog={"vast/vms.csv": [row]},
            config=price,
            pin={"ask": purchase["ask"], "machine": purchase["machine"]},
            launch_interval_s=LAUNCH_INTERVAL_S,
            refusal_may_leave_machine=offer.spot,
        )

    async def confirm(self, handle: Handle, purchase: Purchase) -> None:
        """Do nothing: the listing has all facts that Vast reports."""

    async def close(self) -> None:
        for api in self._apis.values():
            await api.close()
        self._apis.clear()

    async def _read(
        self, method: str, path: str, body: Any = None, *, query: Mapping[str, str] | None = None
    ) -> Mapping[str, Any]:
        """Return the answer to a read-only call. Raises a ProviderError if the answer contains an error."""
        answer = await self._call(method, path, body, query=query)
        if flag(answer.get("success")) is False or answer.get("error"):
            raise _error(f"Vast: {method} {path}", _error_text(answer))
        return answer

    async def _call(
        self, method: str, path: str, body: Any = None, *, query: Mapping[str, str] | None = None
    ) -> Mapping[str, Any]:
        """Make a call and return its answer. Reads the key at each call, so a new key needs no restart."""
        key = key_of("vast", self._env, self._home).key
        if key not in self._apis:
            headers = {"Authorization": f"Bearer {key}"}
            endpoint = self._config.endpoint or ENDPOINT
            self._apis[key] = Rest("Vast", endpoint, headers, key_help=key_help("vast"), absent=_ABSENT)
        answer = await self._apis[key].call(method, path, body, query=query)
        if not isinstance(answer, dict):
            raise OutcomeUnknown(f"Vast: {method} {path}: the answer is not an object")
        return answer


def _next_token(answer: Mapping[str, Any]) -> str | None:
    """Return the token of the next page; None: this page is the last. Raises OutcomeUnknown for an unreadable one."""
    token = answer.get("next_token")
    if token is None or token in ("", False):
        return None
    if (readable := text(token)) is None:
        raise OutcomeUnknown("Vast: the listing does not say whether there are further instances")
    return readable


def _error_text(answer: Mapping[str, Any]) -> str:
    return " ".join(f"{answer.get('error') or ''} {answer.get('msg') or ''}".split())[:200]


def _error(call: str, message: str) -> ProviderError:
    if _REFUSED.search(message):
        return Rejected(f"Vast refuses the key ({message}): {key_help('vast')}")
    return OutcomeUnknown(f"{call}: {message or 'it failed, and no reason is given'}")


def _fault_message(machine: Mapping[str, Any]) -> str | None:
    """Return the reason for which the container never starts: the image, or the host's driver, runtime or disk.

    The host retries as long as the instance exists and is billed. None: no such reason is reported.
    """
    status = " ".join(str(machine.get("status_msg") or "").split())[:300]
    if _state(machine) is InstanceState.RUNNING:
        return None
    if cannot_start(status) and not image_refused(status):
        return f"the host cannot start the container: {status}"
    if not image_refused(status):
        return None
    return f"the image cannot be pulled: {status}; {IMAGE_FIX}"


def _observed(name: Any, machine: Mapping[str, Any]) -> Observed:
    """Return an instance. An unreadable id or name raises; any other unreadable fact counts as not reported."""
    gpu, memory = text(machine.get("gpu_name")), positive(machine.get("gpu_ram"))
    memory_bytes = int(memory) * MIB if memory else None
    rate = positive(machine.get("dph_total"))
    return Observed(
        handle=Handle(
            provider="vast", id=str(machine["id"]), name=name, region=country(machine.get("geolocation")) or ""
        ),
        state=_state(machine),
        accelerator=accelerator(gpu, memory_bytes) if gpu else None,
        gpus=as_integer(machine.get("num_gpus")),
        gpu_memory_bytes=memory_bytes,
        spot=flag(machine.get("is_bid")),
        usd_per_hour=None if rate is None else usd(str(machine["dph_total"]).strip()),
        fault=_fault_message(machine),
        created_at=moment(machine.get("start_date")),
    )


def _state(machine: Mapping[str, Any]) -> InstanceState:
    """Return the state of an instance.

    `actual_status` is the container's status, null before it exists. The other two fields are the requested status.
    """
    actual, intended, current = (
        status.strip().lower() if isinstance(status := machine.get(key), str) else status
        for key in ("actual_status", "intended_status", "cur_state")
    )
    if actual in _STOPPED or "stopped" in (intended, current):
        return InstanceState.STOPPED
    if actual == "running":
        return InstanceState.RUNNING
    return InstanceState.STARTING if actual is None or actual in _STARTING else InstanceState.UNKNOWN

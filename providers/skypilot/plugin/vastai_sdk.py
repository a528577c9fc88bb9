"""Vast.ai's API as SkyPilot calls it: installed as the top-level module `vastai_sdk`, the name that SkyPilot imports.

It replaces the package `vastai-sdk`, which pins exact versions of other packages and depends on one under the AGPL.
A `vastai-sdk` in the same environment wins, because Python prefers its folder to our file.
"""

import os
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import requests

from .call_turns import FOLDER_VARIABLE, CallTurns, address_folder, slots_folder

TRIES = 3
"""Number of calls before a transient error is raised."""
READ_TRIES = 12
"""The same for a call that only reads. The daemon lists the same account, so several reads in a row may be refused."""
JITTER = 0.5
"""Largest share of a delay that is added at random, so that two processes do not meet at each repetition."""
RETRY_DELAY_S = 0.15
"""Seconds before the first repetition; each following delay is twice as long."""
MAX_DELAY_S = 5.0
"""Longest delay that the client chooses itself, in seconds."""
TIMEOUT_S = 120.0
"""Timeout of one call in seconds."""
MAX_RETRY_AFTER_S = 60.0
"""Longest Retry-After of a refusal that is waited for, in seconds."""


@dataclass(frozen=True)
class Pace:
    """Rate of one kind of call that Vast accepts (vast-ai/docs api-reference/openapi/yaml, read 2026-11-28)."""

    pattern: str
    """Pattern of method and path."""
    name: str
    interval_s: float
    """Seconds in which `calls` calls may begin."""
    penalty_s: float
    """Seconds before a call is repeated that was refused by a 429 without Retry-After."""
    calls: int = 1
    longest_queue_s: float = inf
    """See `CallTurns`."""


PACES = (
    Pace(r"PUT v0/asks/", "create", interval_s=4.5, penalty_s=12.0),
    Pace(r"DELETE v0/instances/", "destroy", interval_s=3.0, penalty_s=3.0, longest_queue_s=3.0),
    Pace(r"GET v1/instances/", "listing", interval_s=1.2, penalty_s=1.0, longest_queue_s=5.0),
    Pace(r"POST v0/bundles/", "search", interval_s=60.0, penalty_s=6.0, calls=10, longest_queue_s=6.0),
)
"""The daemon takes slots of the same names (`providers.vast.provider.LIMITS`)."""
UNPACED_PENALTY_S = 1.0
"""Shortest delay after a 429 of another call, in seconds."""
PAGE = 25
"""Instances in one page of a listing."""
_TRANSIENT = frozenset({429, 502, 503, 504})
_DEFAULT_FILTERS = {"verified": {"eq": True}, "external": {"eq": False}, "rentable": {"eq": True}}
_TERM = re.compile(r'(\w+)\s*(>=|<=|!=|==|=|>|<)\s*("[^"]*"|\S+)')
_OPERATORS = {">=": "gte", "<=": "lte", ">": "gt", "<": "lt", "!=": "neq", "=": "eq", "==": "eq"}
_GB_FIELDS = frozenset({"cpu_ram", "gpu_ram", "gpu_total_ram"})
"""Fields that a query gives in GB and the API in MB."""
_REGIONS = {
    "AF": "DZ AO BJ BW BF BI CM CV CF TD KM CD CG DJ EG GQ ER ET GA GM GH GN GW KE LS LR LY MW MA ML MR MU MZ NA NE NG "
    "RW SH ST SN SC SL SO ZA SS SD SZ TZ TG TN UG YE ZM ZW",
    "AS": "AE AM AZ BD BH BN BT MM KH KP IN ID IR IQ IL JP JO KZ LI MY MV MN NP KR PK PH QA SA SG LK SY TW TJ TH TR TM "
    "VN YE HK CN OM",
    "EU": "AL AD AT BY BE BA BG HR CY CZ DK EE FI FR GE DE GR HU IS IT KZ LV LI LT LU MT MD MC ME NL NO PL PT RO RU RS "
    "SK SI ES SE CH UA GB VA MK",
    "LC": "AG AR BS BB BZ BO BR CL CO CR CU DO EC SV GY HT HN JM MX NI PA PY PE PR TT UY VE",
    "NA": "CA US",
    "OC": "AU FJ GU KI MH FM NR NZ PG PW SB TO TV VU",
}
"""Countries of each region that SkyPilot's catalog of Vast names (`georegion`)."""
_FIELDS_OF_CREATE = {
    "onstart_cmd": "onstart",
    "login": "image_login",
    "jupyter_lab": "use_jupyter_lab",
    "template_hash": "template_hash_id",
    "bid_price": "price",
}
"""Field of the API by the argument of `create_instance`, where the names differ."""


class VastAI:
    """Client of one account."""

    def __init__(self, api_key: str | None = None, server_url: str | None = None) -> None:
        """Read key and address from the environment or the user's files, unless they are given.

        Raises RuntimeError if there is no key.
        """
        base = server_url or os.environ.get("VAST_URL") or "https://console.vast.ai"
        self.client = SimpleNamespace(api_key=api_key or _account_key(), server_url=base.rstrip("/"))

    # -------------------------------------------------------------------------------------------------------- offers

    def search_offers(self, query: str = "", type: str = "on-demand", order: str = "score-", limit: int = 0) -> Any:
        """Return the rentable offers that match a query such as `num_gpus=1 gpu_name="RTX 4090"`, the best first."""
        field = order.strip("+-")
        filters = {**_DEFAULT_FILTERS, **parse_query(query)}
        body: dict[str, Any] = {name: tests for name, tests in filters.items() if "any" not in tests.values()}
        body |= {"order": [[field, "desc" if order.endswith("-") else "asc"]], "type": type, "allocated_storage": 5.0}
        return self._call("POST", "v0/bundles/", body | ({"limit": limit} if limit else {}))["offers"]

    # ----------------------------------------------------------------------------------------------------- instances

    def create_instance(self, id: int, **fields: Any) -> Any:
        """Rent an offer. `fields`: fields of the API, or the names of `vastai-sdk` for them."""
        body: dict[str, Any] = {"client_id": "me", "disk": 10, "env": {}}
        body |= {_FIELDS_OF_CREATE.get(name, name): value for name, value in fields.items()}
        return self._call("PUT", f"v0/asks/{id}/", body)

    def show_instances(self) -> list[dict[str, Any]]:
        """Return all instances of the account."""
        instances: list[dict[str, Any]] = []
        query = {"select_filters": "{}", "order_by": '[{"col": "id", "dir": "asc"}]', "limit": str(PAGE)}
        while True:
            page = self._call("GET", "v1/instances/", query=query)
            instances += [_readable(row) for row in page.get("instances") or ()]
            if not page.get("next_token"):
                return instances
            query["after_token"] = page["next_token"]

    def show_instance(self, id: int) -> dict[str, Any] | None:
        """Return one instance, or None if it does not exist."""
        row = self._call("GET", f"v0/instances/{id}/", query={"owner": "me"})["instances"]
        return row and _readable(row)

    def start_instance(self, id: int) -> Any:
        return self._call("PUT", f"v0/instances/{id}/", {"state": "running"})

    def stop_instance(self, id: int) -> Any:
        return self._call("PUT", f"v0/instances/{id}/", {"state": "stopped"})

    def destroy_instance(self, id: int) -> Any:
        return self._call("DELETE", f"v0/instances/{id}/", {})

    # ------------------------------------------------------------------------------------------------------ SSH keys

    def create_ssh_key(self, ssh_key: str) -> Any:
        return self._call("POST", "v0/ssh/", {"ssh_key": ssh_key})

    def show_ssh_keys(self) -> Any:
        return self._call("GET", "v0/ssh/")

    # ---------------------------------------------------------------------------------------------------------- HTTP

    def _call(self, method: str, path: str, body: Any = None, *, query: Mapping[str, str] | None = None) -> Any:
        """Return the answer's JSON. Raises requests.RequestException, after several calls if the error may pass."""
        headers = {"Authorization": f"Bearer {self.client.api_key}", "User-Agent": "gpubroker"}
        url, delay_s = f"{self.client.server_url}/api/{path}", RETRY_DELAY_S
        pace = next((pace for pace in PACES if re.match(pace.pattern, f"{method} {path}")), None)
        turns = self._turns(pace) if pace else None
        for left in reversed(range(READ_TRIES if method == "GET" else TRIES)):
            if turns:
                turns.wait()
            try:
                answer = requests.request(method, url, params=query, json=body, headers=headers, timeout=TIMEOUT_S)
            except (requests.ConnectionError, requests.Timeout):
                if not left:
                    raise
            else:
                is_refused = answer.status_code == 429
                penalty_s = pace.penalty_s if pace else max(delay_s, UNPACED_PENALTY_S)
                pause_s = _retry_delay_s(answer, penalty_s if is_refused else delay_s)
                if turns and is_refused:
                    turns.postpone(pause_s or penalty_s)
                if not left or pause_s is None:
                    _raise_for_status(answer)
                    return answer.json()
                delay_s = pause_s
            time.sleep(delay_s * random.uniform(1, 1 + JITTER))
            delay_s = min(2 * delay_s, MAX_DELAY_S)
        raise AssertionError("unreachable")

    def _turns(self, pace: Pace) -> CallTurns:
        folder = Path(os.environ.get(FOLDER_VARIABLE) or slots_folder(Path.home()))
        path = address_folder(folder, self.client.server_url) / pace.name
        return CallTurns(path, pace.interval_s, calls=pace.calls, longest_queue_s=pace.longest_queue_s)


def parse_query(query: str) -> dict[str, dict[str, Any]]:
    """Return the API's filters for a query: terms `field operator value`, with quotation marks around spaces.

    `chunked` and `georegion` are not filters. With `georegion=true` a region as geolocation means its countries.
    """
    filters: dict[str, dict[str, Any]] = {}
    for name, operator, text in _TERM.findall(query):
        filters.setdefault(name, {})[_OPERATORS[operator]] = _value(name, text.strip('"'))
    filters.pop("chunked", None)
    has_regions = filters.pop("georegion", {}).get("eq") is True
    region = filters.get("geolocation", {}).get("eq")
    if has_regions and region in _REGIONS:
        filters["geolocation"] = {"in": _REGIONS[region].split()}
    return filters


def _value(name: str, text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if name in _GB_FIELDS:
        return float(text) * 1000
    if re.fullmatch(r"-?\d+(\.\d+)?", text):
        return float(text) if "." in text else int(text)
    return text.replace("_", " ")


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    """Return an instance without spaces around its texts, and with its variables as a dictionary."""
    texts = {name: value.strip() for name, value in row.items() if isinstance(value, str)}
    return row | texts | {"extra_env": dict(row.get("extra_env") or ())}


def _retry_delay_s(answer: requests.Response, default_s: float) -> float | None:
    """Return the seconds before a repetition of the call; None: the answer is final."""
    if answer.status_code not in _TRANSIENT or "search_quota_exceeded" in answer.text:
        return None
    try:
        wait_s = float(answer.headers["Retry-After"])
    except (KeyError, ValueError):
        return default_s
    return wait_s if wait_s <= MAX_RETRY_AFTER_S else None


def _raise_for_status(answer: requests.Response) -> None:
    """Raise requests.HTTPError for a refusal, with the code and the message of Vast's answer."""
    try:
        answer.raise_for_status()
    except requests.HTTPError as e:
        raise requests.HTTPError(f"{e}: {' '.join(answer.text.split())[:200]}", response=answer) from None


def _account_key() -> str:
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    files = (folder / "vastai" / "vast_api_key", Path.home() / ".vast_api_key")
    keys = [os.environ.get("VAST_API_KEY") or "", *(path.read_text().strip() for path in files if path.is_file())]
    key = next(filter(None, keys), None)
    if key is None:
        raise RuntimeError(f"Vast's API key is missing: set VAST_API_KEY, or write it to {files[0]}")
    return key

"""JSON over HTTP with a cloud's own API: one session, one time limit, and every answer told apart by what is known."""

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from broker.domain.errors import Gone, OutcomeUnknown, ProviderError, Rejected, Throttled

PATIENCE_S = 20.0
AGAIN_S = 5.0
"""After a 429 that does not say when."""


class Rest:
    """One cloud's API at `base`. `key_help`: where people get a key, for the message of a 401. `absent`: the API's own
    words, in an answer with status 404, for an object that is not there; without them such a status says nothing.
    """

    def __init__(
        self, cloud: str, base: str, headers: Mapping[str, str], *, key_help: str, absent: re.Pattern[str] | None = None
    ) -> None:
        self._cloud, self._base, self._headers, self._key_help = cloud, base.rstrip("/"), dict(headers), key_help
        self._absent = absent
        self._session: aiohttp.ClientSession | None = None

    async def call(self, method: str, path: str, body: Any = None, *, query: Mapping[str, str] | None = None) -> Any:
        """The decoded answer. Raises Rejected (4xx), Gone (`absent`), Throttled (429), OutcomeUnknown (all else)."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout, trust_env=True)
        what = f"{self._cloud}: {method} {path}"
        try:
            async with self._session.request(method, self._base + path, json=body, params=query) as response:
                text = await response.text()
        except (TimeoutError, aiohttp.ClientError, OSError) as e:
            raise OutcomeUnknown(f"{what}: {type(e).__name__} {e}".rstrip()) from None
        if response.status >= 300:
            raise self.error(what, response.status, text, response.headers.get("Retry-After"))
        try:
            return json.loads(text) if text else None
        except ValueError:
            raise OutcomeUnknown(f"{what}: the answer is not JSON: {text[:80]!r}") from None

    def error(self, what: str, status: int, text: str, retry_after: str | None) -> ProviderError:
        """What an HTTP status says about the request."""
        said = " ".join(text.split())[:200]
        match status:
            case 401 | 403:
                return Rejected(f"{self._cloud} refuses the key ({status}): {self._key_help}")
            case 404 if self._absent is not None and _is_object(text) and self._absent.search(text):
                return Gone(f"{what}: 404 {said}")
            case 404:
                return OutcomeUnknown(f"{what}: 404 {said}")  # a proxy's, or of a path that the API has no more
            case 429:
                return Throttled(f"{what}: 429 too many requests", after_s=_seconds(retry_after))
            case _ if 400 <= status < 500 and status != 408:
                return Rejected(f"{what}: {status} {said}")
        return OutcomeUnknown(f"{what}: {status} {said}")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _seconds(retry_after: str | None) -> float:
    """Of a Retry-After, which is a number of seconds or a date."""
    if retry_after is None:
        return AGAIN_S
    if retry_after.replace(".", "", 1).isdecimal():
        return float(retry_after)
    try:
        then = parsedate_to_datetime(retry_after)
    except ValueError:
        return AGAIN_S
    return max(0.0, (then - datetime.now(UTC)).total_seconds()) if then.tzinfo else AGAIN_S

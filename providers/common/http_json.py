"""JSON client of a cloud's HTTP API: one session, one time limit, and answers mapped to the broker's errors."""

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from broker.domain.errors import Gone, OutcomeUnknown, ProviderError, Rejected, Throttled

TIMEOUT_S = 20.0
_PAGE = re.compile(r"<!doctype|<html|<head|<title|cloudflare|attention required|just a moment", re.I)
"""Text of a page for people: an API answers in JSON, and a CDN or a proxy in front of it in HTML."""
_KEY = re.compile(
    r"\b(invalid|wrong|unknown|missing|expired|revoked|no|bad)[ _-](user[ _-])?(api[ _-]?)?(key|token|credentials?)\b|"
    r"\bauth_error\b|\bunauthori[sz]ed\b|\bunauthenticated\b",
    re.I,
)
"""Refusals of the key under another status than 401: Vast answers 404 with `Invalid user key`."""
_SPENDING = re.compile(
    r"insufficient.{0,20}(credit|balance|funds)|(not enough|lacks?|no) (credits?|balance|funds)\b|negative balance|"
    r"(credit|balance) (is )?(too low|zero|exhausted)|payment (method|required)|spend(ing)?[ -]limit|hourly spend",
    re.I,
)
"""Refusals for the account's money, which some APIs send with the status of a refused key."""
_RATE = re.compile(r"too many requests|requests too frequent|rate[ -]?limit|request limit exceeded|throttl", re.I)
"""Refusals for the rate of calls under another status than 429."""
RETRY_S = 5.0
"""Seconds before a retry after a 429 without Retry-After."""
MAX_RETRY_S = 3600.0
"""Longest pause in seconds: a date of a wrong clock would mean one of years."""
EPOCH_FROM = 1e9
"""Smallest Retry-After that is read as a time of the epoch, as some limiters write it."""


class Rest:
    """Client of one cloud's API at `base`.

    `key_help`: how to get a key, for the message of a 401. `absent`: text with which a 404 of this API reports a
    missing object; a 404 without this text proves nothing.
    """

    def __init__(
        self, cloud: str, base: str, headers: Mapping[str, str], *, key_help: str, absent: re.Pattern[str] | None = None
    ) -> None:
        self._cloud, self._base, self._headers, self._key_help = cloud, base.rstrip("/"), dict(headers), key_help
        self._absent = absent
        self._session: aiohttp.ClientSession | None = None

    async def call(self, method: str, path: str, body: Any = None, *, query: Mapping[str, str] | None = None) -> Any:
        """Return the decoded answer. Raises Rejected (4xx), Gone (`absent`), Throttled (429), or OutcomeUnknown."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout, trust_env=True)
        request = f"{self._cloud}: {method} {path}"
        try:
            async with self._session.request(method, self._base + path, json=body, params=query) as response:
                # A page of a proxy may name a wrong character set, which must not hide its status.
                text = (await response.read()).decode("utf-8-sig", errors="replace")
        except (TimeoutError, aiohttp.ClientError, OSError) as e:
            raise OutcomeUnknown(f"{request}: {type(e).__name__} {e}".rstrip()) from None
        if response.status >= 300:
            raise self.error(request, response.status, text, response.headers.get("Retry-After"))
        try:
            return json.loads(text) if text.strip() else None
        except (ValueError, RecursionError):
            raise OutcomeUnknown(f"{request}: the answer is not JSON: {text[:80]!r}") from None

    def error(self, request: str, status: int, text: str, retry_after: str | None) -> ProviderError:
        """Return the broker's error for an HTTP status. `request`: description of the request for the message."""
        message = self.message(text)
        match status:
            case 401 | 403 if not _is_object(text) and (status == 403 or _PAGE.search(text)):
                return OutcomeUnknown(f"{request}: {status} by a proxy or a CDN, not by {self._cloud}: {message[:80]}")
            case 429:
                return Throttled(f"{request}: 429 too many requests", after_s=retry_after_s(retry_after))
            case 400 | 401 | 403 if _is_object(text) and _RATE.search(text):
                return Throttled(f"{request}: {status} {message}", after_s=retry_after_s(retry_after))
            case 400 | 401 | 402 | 403 if _is_object(text) and _SPENDING.search(text):
                return Rejected(f"{request}: {status} {message}; pay in at {self._cloud}, or raise the limit there")
            case 400 | 401 | 403 | 404 if status in (401, 403) or (_is_object(text) and _KEY.search(text)):
                return Rejected(f"{self._cloud} refuses the key ({status}): {self._key_help}")
            case 404 if self._absent is not None and _is_object(text) and self._absent.search(text):
                return Gone(f"{request}: 404 {message}")
            case 404:
                # Sent by a proxy, or by an API that removed the path.
                return OutcomeUnknown(f"{request}: 404 {message}")
            case _ if 400 <= status < 500 and status not in (408, 425):
                return Rejected(f"{request}: {status} {message}")
        return OutcomeUnknown(f"{request}: {status} {message}")

    def message(self, text: str) -> str:
        """Return the text of an error in one line."""
        return " ".join(text.split())[:200]

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def retry_after_s(retry_after: str | None) -> float:
    """Return the seconds of a Retry-After header, which holds a number of seconds, a date, or a time of the epoch."""
    if retry_after is None:
        return RETRY_S
    now = datetime.now(UTC)
    if (match := re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*(?:s|sec|seconds?)?\s*", retry_after, re.I)) is not None:
        seconds = float(match[1])
        if seconds >= EPOCH_FROM:
            seconds -= now.timestamp()
    else:
        try:
            then = parsedate_to_datetime(retry_after)
            if "-0000" in retry_after:
                return RETRY_S
            # A date without a zone is UTC: the old forms of HTTP dates have none.
            seconds = (then.replace(tzinfo=then.tzinfo or UTC) - now).total_seconds()
        except (ValueError, TypeError, OverflowError):
            return RETRY_S
    return min(max(seconds, 0.0), MAX_RETRY_S)

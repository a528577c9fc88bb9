"""Client of RunPod's two APIs: REST v2 for everything, GraphQL for what v2 lacks and as the fallback.

Dates by docs.runpod.io/api-reference-v2/migrate-from-v1 (read 2026-11-28): REST v1 ends on 1 December 2026, GraphQL in
early 2027. A retired API answers 410, or 404 for a path that it had. Neither answer proves that a machine is absent.
"""

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from broker.domain.errors import OutcomeUnknown, ProviderError, Rejected, Throttled
from providers.common.cloud_values import as_integer, flag
from providers.common.credentials import key_help, key_of
from providers.common.http_json import Rest

log = logging.getLogger(__name__)

ENDPOINT = "https://api.runpod.io"
REST, GRAPHQL = "REST v2", "GraphQL"
MAX_PAGES = 1000
"""Pages of pods after which a listing counts as endless and thus as unknown."""
_REFUSED = re.compile(
    r"\b(?:unauthorized|unauthenticated|forbidden|invalid api key|(?:status(?: code)?|http|error)[ :=]*40[13])\b", re.I
)
"""Messages for a refused key. A bare 401 does not match, because it may be part of an id."""
_TOTALS = ("total", "totalCount", "totalItems", "count")
"""Names of fields that may hold the number of all pods."""
_MORE = re.compile(r"next|cursor|page|more|truncat", re.I)
"""Names of fields that may say that a listing has a further page."""


class ApiRetired(OutcomeUnknown):
    """One of RunPod's APIs has ended: its answers prove nothing, and the other API is tried."""


class PodNotFound(OutcomeUnknown):
    """REST v2 reports that it has no such pod. Only a complete listing proves that the pod is absent."""


class _Client(Rest):
    """One API at one key: RFC 9457 problems and retirement mapped to the broker's errors."""

    def __init__(self, api: str, base: str, key: str) -> None:
        headers = {"Authorization": f"Bearer {key}", "User-Agent": "gpubroker"}
        super().__init__("RunPod", base, headers, key_help=key_help("runpod"))
        self._api = api

    def error(self, request: str, status: int, text: str, retry_after: str | None) -> ProviderError:
        problem = _problem(text)
        if status == 404 and problem is not None and "/v2/pods/" in request:
            return PodNotFound(f"{request}: 404 {problem}")
        if status in (404, 410):
            message = " ".join(text.split())[:120]
            return ApiRetired(f"{request}: {status} {message}; RunPod's {self._api} does not answer there any more")
        if status == 402:
            return Rejected(f"{request}: 402 {problem}; pay in at https://www.console.runpod.io/user/billing")
        return super().error(request, status, text, retry_after)

    def message(self, text: str) -> str:
        return _problem(text) or super().message(text)


class RunpodApi:
    """RunPod's APIs with the current key, which is read at each call, so that a new key needs no restart."""

    def __init__(self, endpoint: str | None, env: Mapping[str, str], home: Path) -> None:
        self._base, self._env, self._home = endpoint or ENDPOINT, env, home
        self._clients: dict[tuple[str, str], _Client] = {}
        self.retired: dict[str, str] = {}
        """Latest message of each retired API, by API."""

    def key_mark(self) -> str:
        """Return a mark of the current key: a digest that two keys never share."""
        key = key_of("runpod", self._env, self._home).key
        return f"key-{hashlib.sha256(key.encode()).hexdigest()[:32]}"

    async def rest(self, method: str, path: str, query: Mapping[str, str] | None = None) -> Any:
        """Return the answer of REST v2. Raises ApiRetired, PodNotFound, Rejected, Throttled, OutcomeUnknown."""
        answer = await self._call(REST, method, f"/v2{path}", None, query)
        if isinstance(answer, dict) and (problem := _problem_of(answer)) is not None:
            raise OutcomeUnknown(f"RunPod: {method} {path}: {problem}")
        return answer

    async def graphql(self, query: str) -> Mapping[str, Any]:
        """Run a GraphQL query and return `data`. Raises ApiRetired, Rejected, Throttled, OutcomeUnknown."""
        answer = await self._call(GRAPHQL, "POST", "/graphql", {"query": query}, None)
        if not isinstance(answer, dict):
            raise OutcomeUnknown("RunPod: the answer is not GraphQL")
        if answer.get("errors"):
            raise _graphql_error(answer["errors"])
        data = answer.get("data")
        if not isinstance(data, dict):
            raise OutcomeUnknown("RunPod: the answer has no `data`")
        return data

    async def pods(self) -> Sequence[Mapping[str, Any]]:
        """Return all pods by REST v2. Raises OutcomeUnknown unless every page was read.

        The OpenAPI document of 2026-08-20 has no paging. SkyPilot's client (pull request 10846, 2026-09-22) follows
        `pagination: {nextCursor, hasNextPage}` by `?cursor=`. Both answers are read. Unknown: the size of a page.
        """
        pods: list[Mapping[str, Any]] = []
        cursors: set[str] = set()
        query: dict[str, str] = {}
        for _ in range(MAX_PAGES):
            answer = await self.rest("GET", "/pods", query)
            pods += _pods_of(answer)
            cursor = _next_cursor(answer)
            if cursor is None:
                by_id = {str(pod["id"]): pod for pod in pods}
                _check_total(answer, len(by_id))
                return list(by_id.values())
            if cursor in cursors:
                break
            cursors.add(cursor)
            query = {"cursor": cursor}
        raise OutcomeUnknown("RunPod: the listing of pods does not end, so it proves nothing")

    async def graphql_pods(self, query: str) -> Sequence[Mapping[str, Any]]:
        account = (await self.graphql(query)).get("myself")
        if not isinstance(account, dict):
            raise OutcomeUnknown("RunPod: the answer has no list of pods")
        return _checked_pods(account.get("pods"))

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
        self._clients.clear()

    async def _call(self, api: str, method: str, path: str, body: Any, query: Mapping[str, str] | None) -> Any:
        key = key_of("runpod", self._env, self._home).key
        if (api, key) not in self._clients:
            self._clients[api, key] = _Client(api, self._base, key)
        try:
            answer = await self._clients[api, key].call(method, path, body, query=query)
        except ApiRetired as e:
            if api not in self.retired:
                log.warning("%s; the other API is used where it can be, update gpubroker", e)
            self.retired[api] = str(e)
            raise
        self.retired.pop(api, None)
        return answer


def _problem(text: str) -> str | None:
    """Return the detail of an RFC 9457 problem as RunPod writes it; None: the text is not a problem document.

    Source: schema `ErrorResponse` (title, status, detail, errors) of the OpenAPI document of 2026-08-20.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _problem_of(document) if isinstance(document, dict) else None


def _problem_of(document: Mapping[str, Any]) -> str | None:
    if "title" not in document or "detail" not in document:
        return None
    causes = document.get("errors")
    parts = [document["detail"], *(causes if isinstance(causes, list) else [])]
    return " ".join("; ".join(map(str, parts)).split())[:200]


def _pods_of(answer: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(answer, dict):
        raise OutcomeUnknown("RunPod: the answer has no list of pods")
    if "detail" in answer or answer.get("errors") or answer.get("error"):
        raise OutcomeUnknown(f"RunPod: the listing comes with an error: {str(answer)[:120]}")
    return _checked_pods(answer.get("pods"))


def _checked_pods(pods: object) -> Sequence[Mapping[str, Any]]:
    """Return a list of pods. Raises OutcomeUnknown unless each pod has an id, because it would seem absent."""
    if not isinstance(pods, list):
        raise OutcomeUnknown("RunPod: the answer has no list of pods")
    for pod in pods:
        if not isinstance(pod, dict) or not isinstance(pod.get("id"), str) or not pod["id"]:
            raise OutcomeUnknown("RunPod: a pod of the listing cannot be read: it has no id")
    return list(pods)


def _check_total(answer: Mapping[str, Any], count: int) -> None:
    """Raise OutcomeUnknown if the last page names more pods than were listed."""
    pagination = answer.get("pagination")
    for fields in (answer, pagination if isinstance(pagination, dict) else {}):
        for name in _TOTALS:
            total = as_integer(fields.get(name))
            if total is not None and total > count:
                raise OutcomeUnknown(f"RunPod: the listing shows {count} of {total} pods")


def _next_cursor(answer: Mapping[str, Any]) -> str | None:
    """Return the cursor of the next page; None: this page is the last. Raises OutcomeUnknown if that is unclear."""
    if any(value and _MORE.search(name) for name, value in answer.items() if name != "pagination"):
        raise OutcomeUnknown("RunPod: the listing has pages of an unknown kind, so it proves nothing")
    pagination = answer.get("pagination")
    if pagination is None:
        return None
    page = pagination if isinstance(pagination, dict) else {}
    cursor, has_more = page.get("nextCursor"), page.get("hasNextPage", page.get("nextCursor", True))
    if has_more is None or flag(has_more) is False:
        return None
    if not isinstance(cursor, str) or not cursor:
        raise OutcomeUnknown("RunPod: the listing does not say whether there are further pods")
    return cursor


def _graphql_error(errors: Any) -> ProviderError:
    """Return the error of a GraphQL answer, whose status is always 200; an unknown error becomes OutcomeUnknown."""
    first = errors[0] if isinstance(errors, list) and errors else errors
    message = " ".join(str(first.get("message", first) if isinstance(first, dict) else first).split())[:200]
    extensions = first.get("extensions") if isinstance(first, dict) else None
    code = str(extensions.get("code", "")) if isinstance(extensions, dict) else ""
    lower = f"{code} {message}".lower()
    if _REFUSED.search(lower):
        return Rejected(f"RunPod refuses the key ({message}): {key_help('runpod')}")
    if "too many requests" in lower or "rate limit" in lower:
        return Throttled(f"RunPod: {message}")
    if code == "GRAPHQL_VALIDATION_FAILED" or message.startswith("Cannot query field"):
        return Rejected(f"RunPod does not know this query any more: {message}")
    return OutcomeUnknown(f"RunPod: {message}")

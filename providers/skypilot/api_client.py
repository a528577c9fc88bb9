"""SkyPilot's API server over its own HTTP: what a launch needs, and nothing of SkyPilot in this process.

SkyPilot's SDK costs 2 s and 160 MB to import, keeps its server's address and its home in process-wide state, and starts
a server of its own when it finds none. The version is pinned, so the few calls are known: `sky/server/server.py` and
`sky/server/requests/payloads.py` of 0.14.1.
"""

import asyncio
import json
import uuid
from collections.abc import Mapping
from typing import Any

import aiohttp

from broker.domain.errors import OutcomeUnknown, Rejected
from providers.skypilot.shared import PIN, PLUGIN, PLUGIN_VERSION, ROWS, SKY_VERSION, TOKEN_HEADER

PATIENCE_S = 20.0
_API_VERSION = "62"
_UNFINISHED = frozenset({"PENDING", "WAITING", "RUNNING"})


class Failure(Exception):
    """A request that failed: SkyPilot's exception class and what it says, causes included."""

    def __init__(self, *, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message


class SkyApi:
    """One API server at `base`. `token`: what our plugin asks of every caller; empty for none."""

    def __init__(self, base: str, *, token: str = "", user: str) -> None:
        self._base, self._token, self._user = base.rstrip("/"), token, user
        self._session: aiohttp.ClientSession | None = None

    async def healthy(self) -> bool:
        """Whether it answers. Raises Rejected for another version of SkyPilot than ours."""
        try:
            said = await self._call("GET", "/api/health", patience_s=3.0)
        except (OutcomeUnknown, Failure):
            return False
        if said.get("version") != SKY_VERSION:
            raise Rejected(f"the API server at {self._base} runs SkyPilot {said.get('version')}; install {SKY_VERSION}")
        return bool(said.get("status") == "healthy")

    async def require_plugin(self) -> None:
        """Raises Rejected where account keys would reach machines: without our plugin, or with another one."""
        said = await self._call("GET", "/api/plugins")
        if not any(p.get("name") == "gpubroker" and p.get("version") == PLUGIN_VERSION for p in said["plugins"]):
            raise Rejected(
                f"the API server at {self._base} lacks the plugin of this gpubroker ({PLUGIN_VERSION}): "
                f"install the same gpubroker there, and name {PLUGIN} in its plugins.yaml"
            )

    async def launch(
        self,
        task: str,
        cluster: str,
        config: Mapping[str, object],
        pin: Mapping[str, str],
        rows: Mapping[str, object],
    ) -> str:
        """Hands in a launch; the request's id. `task`: YAML. `pin`, `rows` of the catalog: for our plugin."""
        body = {
            "task": task,
            "cluster_name": cluster,
            "quiet_optimizer": True,
            "disable_controller_check": True,
            "override_skypilot_config": dict(config),
        }
        told = {PIN: json.dumps(dict(pin)), ROWS: json.dumps(dict(rows), default=dict)}
        return await self._submit("/launch", body, told)

    async def result(self, request: str) -> None:
        """Waits until the request has ended. Raises Failure; OutcomeUnknown when it cannot be learned."""
        said = await self._call("GET", "/api/get", query={"request_id": request}, patience_s=None)
        if said.get("status") != "SUCCEEDED":
            raise Failure(kind=str(said.get("status")), message=f"request {request} ended without a result")

    async def unfinished(self, cluster: str) -> list[str]:
        """Ids of the launches of `cluster` that have not ended."""
        said = await self._requests([("cluster_name", cluster)])
        mine = (one for one in said if one["cluster_name"] == cluster and one["name"] == "sky.launch")
        return [one["request_id"] for one in mine if one["status"] in _UNFINISHED]

    async def idle(self) -> bool:
        """No launch of any name is under way."""
        said = await self._requests([])
        return not any(one["name"] == "sky.launch" and one["status"] in _UNFINISHED for one in said)

    async def _requests(self, query: list[tuple[str, str]]) -> Any:
        fields = [("fields", name) for name in ("request_id", "name", "status", "cluster_name")]
        return await self._call("GET", "/api/status", query=[*query, *fields])

    async def launching(self, cluster: str) -> bool:
        """Whether a worker acts on the name, which outlasts the end of a cancelled request."""
        said = await self._call("GET", f"/gpubroker/launching/{cluster}")
        return bool(said["launching"])

    async def cancel(self, requests: list[str]) -> None:
        await self.result(await self._submit("/api/cancel", {"request_ids": requests, "user_id": self._user}))

    async def purge(self, cluster: str) -> None:
        """Drops SkyPilot's record of a cluster, whatever its cloud says of it."""
        await self.result(await self._submit("/down", {"cluster_name": cluster, "purge": True}))

    async def way_in(self, cluster: str) -> dict[str, Any]:
        """Addresses (`nodes`) and login of its machines; empty for an unknown cluster."""
        found: dict[str, Any] = await self._call("GET", f"/gpubroker/ssh/{cluster}")
        return found

    async def _submit(self, path: str, body: Mapping[str, object], env: Mapping[str, str] | None = None) -> str:
        common: dict[str, object] = {
            "env_vars": {
                "SKYPILOT_USER_ID": self._user,
                "SKYPILOT_USER": "gpubroker",
                "SKYPILOT_USAGE_RUN_ID": str(uuid.uuid4()),
                "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
                **(env or {}),
            },
            "entrypoint": "gpubroker",
            "entrypoint_command": "gpubroker",
            "using_remote_api_server": False,
            "override_skypilot_config": {},
            "override_skypilot_config_path": None,
        }
        return str(await self._call("POST", path, body={**common, **body}, header="X-Skypilot-Request-ID"))

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, object] | None = None,
        query: Any = None,
        patience_s: float | None = PATIENCE_S,
        header: str | None = None,
    ) -> Any:
        what = f"SkyPilot's API server: {method} {path}"
        try:
            async with self._open().request(
                method, self._base + path, json=body, params=query, timeout=aiohttp.ClientTimeout(total=patience_s)
            ) as response:
                text = await response.text()
                given = response.headers.get(header) if header else None
        except (TimeoutError, aiohttp.ClientError, OSError) as e:
            raise OutcomeUnknown(f"{what}: {type(e).__name__} {e}".rstrip()) from None
        try:
            said = json.loads(text) if text else None
        except ValueError:
            raise OutcomeUnknown(f"{what}: the answer is not JSON: {text[:80]!r}") from None
        if response.status < 300:
            return given if header else said
        raise _failure(said, response.status, what)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"X-SkyPilot-API-Version": _API_VERSION, "X-SkyPilot-Version": SKY_VERSION}
            if self._token:
                headers[TOKEN_HEADER] = self._token
            self._session = aiohttp.ClientSession(headers=headers)
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()
            await asyncio.sleep(0)


def _failure(said: Any, status: int, what: str) -> Exception:
    """A failed request carries the exception as a document; anything else is an answer that we do not know."""
    detail = said.get("detail") if isinstance(said, dict) else None
    if isinstance(detail, dict) and isinstance(detail.get("error"), str):
        error = json.loads(detail["error"]) or {}
        return Failure(kind=str(error.get("type", detail.get("status"))), message=str(error.get("message", "")))
    if status == 401:
        return Rejected(f"{what}: refused (401): the token in the configuration is not the server's")
    return OutcomeUnknown(f"{what}: {status} {str(detail or said)[:200]}")

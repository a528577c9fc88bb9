"""HTTP client of SkyPilot's API server with the few calls that a launch needs; it imports nothing of SkyPilot.

SkyPilot's SDK takes 2 s and 160 MB to import. It keeps the server's address and home in process-wide state, and starts
a server if it finds none. The calls are those of `sky/server/server.py` and `sky/server/requests/payloads.py` of the
pinned version 0.14.1.
"""

import asyncio
import json
import uuid
from collections.abc import Mapping
from typing import Any

import aiohttp

from broker.domain.errors import OutcomeUnknown, Rejected
from providers.skypilot.plugin.shared import PIN, PLUGIN, PLUGIN_VERSION, ROWS, SKY_VERSION, TOKEN_HEADER

REQUEST_TIMEOUT_S = 20.0
"""Default timeout of a request in seconds."""
_API_VERSION = "62"
_UNFINISHED = frozenset({"PENDING", "WAITING", "RUNNING"})


class Failure(Exception):
    """Failed request with the name of SkyPilot's exception class and its message, causes included."""

    def __init__(self, *, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message


class SkyApi:
    """Client of the API server at `base`. `token`: secret that the plugin requires of each caller; empty for none."""

    def __init__(self, base: str, *, token: str = "", user: str) -> None:
        self._base, self._token, self._user = base.rstrip("/"), token, user
        self._session: aiohttp.ClientSession | None = None

    async def is_healthy(self) -> bool:
        """Return True if the server answers. Raises Rejected for a version of SkyPilot other than `SKY_VERSION`."""
        try:
            answer = await self._call("GET", "/api/health", timeout_s=3.0)
        except (OutcomeUnknown, Failure):
            return False
        if answer.get("version") != SKY_VERSION:
            raise Rejected(
                f"the API server at {self._base} runs SkyPilot {answer.get('version')}; install {SKY_VERSION}"
            )
        return bool(answer.get("status") == "healthy")

    async def require_plugin(self) -> None:
        """Raise Rejected if the server lacks this version of the plugin, which keeps account keys off machines."""
        answer = await self._call("GET", "/api/plugins")
        if not any(p.get("name") == "gpubroker" and p.get("version") == PLUGIN_VERSION for p in answer["plugins"]):
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
        """Submit a launch and return the request's id.

        `task`: YAML. `pin` and `rows` (of the catalog): passed to the plugin.
        """
        body = {
            "task": task,
            "cluster_name": cluster,
            "quiet_optimizer": True,
            "disable_controller_check": True,
            "override_skypilot_config": dict(config),
        }
        env = {PIN: json.dumps(dict(pin)), ROWS: json.dumps(dict(rows), default=dict)}
        return await self._submit("/launch", body, env)

    async def result(self, request: str) -> None:
        """Wait until the request has ended.

        Raises Failure if the request failed, and OutcomeUnknown if the server cannot be asked.
        """
        answer = await self._call("GET", "/api/get", query={"request_id": request}, timeout_s=None)
        if answer.get("status") != "SUCCEEDED":
            raise Failure(kind=str(answer.get("status")), message=f"request {request} ended without a result")

    async def unfinished(self, cluster: str) -> list[str]:
        """Return the ids of the launches of `cluster` that have not ended."""
        requests = await self._requests([("cluster_name", cluster)])
        launches = (r for r in requests if r["cluster_name"] == cluster and r["name"] == "sky.launch")
        return [launch["request_id"] for launch in launches if launch["status"] in _UNFINISHED]

    async def is_idle(self) -> bool:
        """Return True if no launch of any cluster is unfinished."""
        requests = await self._requests([])
        return not any(r["name"] == "sky.launch" and r["status"] in _UNFINISHED for r in requests)

    async def _requests(self, query: list[tuple[str, str]]) -> Any:
        fields = [("fields", name) for name in ("request_id", "name", "status", "cluster_name")]
        return await self._call("GET", "/api/status", query=[*query, *fields])

    async def is_launching(self, cluster: str) -> bool:
        """Return True while a worker acts on the cluster. The worker may continue after its request was cancelled."""
        answer = await self._call("GET", f"/gpubroker/launching/{cluster}")
        return bool(answer["launching"])

    async def cancel(self, requests: list[str]) -> None:
        await self.result(await self._submit("/api/cancel", {"request_ids": requests, "user_id": self._user}))

    async def purge(self, cluster: str) -> None:
        """Delete SkyPilot's record of a cluster, even if the cloud fails to answer."""
        await self.result(await self._submit("/down", {"cluster_name": cluster, "purge": True}))

    async def ssh_login(self, cluster: str) -> dict[str, Any]:
        """Return addresses (`nodes`) and login of the cluster's machines; empty for an unknown cluster."""
        login: dict[str, Any] = await self._call("GET", f"/gpubroker/ssh/{cluster}")
        return login

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
        timeout_s: float | None = REQUEST_TIMEOUT_S,
        header: str | None = None,
    ) -> Any:
        call = f"SkyPilot's API server: {method} {path}"
        try:
            async with self._open().request(
                method, self._base + path, json=body, params=query, timeout=aiohttp.ClientTimeout(total=timeout_s)
            ) as response:
                text = await response.text()
                header_value = response.headers.get(header) if header else None
        except (TimeoutError, aiohttp.ClientError, OSError) as e:
            raise OutcomeUnknown(f"{call}: {type(e).__name__} {e}".rstrip()) from None
        try:
            answer = json.loads(text) if text else None
        except ValueError:
            raise OutcomeUnknown(f"{call}: the answer is not JSON: {text[:80]!r}") from None
        if response.status < 300:
            return header_value if header else answer
        raise _failure(answer, response.status, call)

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


def _failure(answer: Any, status: int, call: str) -> Exception:
    """Return the error for an answer with a failure status.

    A failed request carries SkyPilot's exception as a document. Other answers become OutcomeUnknown.
    """
    detail = answer.get("detail") if isinstance(answer, dict) else None
    if isinstance(detail, dict) and isinstance(detail.get("error"), str):
        error = json.loads(detail["error"]) or {}
        return Failure(kind=str(error.get("type", detail.get("status"))), message=str(error.get("message", "")))
    if status == 401:
        return Rejected(f"{call}: refused (401): the token in the configuration is not the server's")
    return OutcomeUnknown(f"{call}: {status} {str(detail or answer)[:200]}")

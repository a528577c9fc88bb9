"""Calls for teams, tokens and the audit."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from broker.client.transport.http import Calls, LazySchemas, plain

if TYPE_CHECKING:
    from broker.api.schemas import tenancy
else:
    tenancy = LazySchemas("tenancy")


class TenancyCalls(Calls):
    async def sign_in_link(self) -> tenancy.SignInLink:
        """Create a link that signs a browser in as this token, once, within a minute."""
        return await self._call("POST", "/v1/me/sign-in-links", tenancy.SignInLink)

    async def tokens(self) -> tenancy.TokenList:
        """List the tokens of your team; for admins all."""
        return await self._call("GET", "/v1/tokens", tenancy.TokenList)

    async def create_token(self, request: tenancy.TokenRequest) -> tenancy.TokenCreated:
        body = request.model_dump(mode="json")
        return await self._call("POST", "/v1/tokens", tenancy.TokenCreated, json=body)

    async def delete_token(self, token_id: str) -> None:
        await self._http.read("DELETE", f"/v1/tokens/{quote(token_id, safe='')}")

    async def teams(self) -> tenancy.TeamList:
        """List your team; for admins all teams."""
        return await self._call("GET", "/v1/teams", tenancy.TeamList)

    async def create_team(self, request: tenancy.TeamRequest) -> tenancy.TeamView:
        return await self._call("POST", "/v1/teams", tenancy.TeamView, json=request.model_dump(mode="json"))

    async def delete_team(self, name: str) -> None:
        await self._http.read("DELETE", f"/v1/teams/{quote(name, safe='')}")

    async def audit(
        self,
        *,
        team: str | None = None,
        actor: str | None = None,
        action: str | None = None,
        target: str | None = None,
        since: str | None = None,
        until: str | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> tenancy.AuditPage:
        """List writes with their actors, newest first; times in ISO 8601."""
        parameters = {"team": team, "actor": actor, "action": action, "target": target, "since": since, "until": until}
        params = plain({**parameters, "cursor": cursor, "limit": limit})
        return await self._call("GET", "/v1/audit", tenancy.AuditPage, params=params)

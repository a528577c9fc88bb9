"""Calls for spending reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.client.transport.http import Calls, LazySchemas, plain

if TYPE_CHECKING:
    from broker.api.schemas import spending
else:
    spending = LazySchemas("spending")


class SpendingCalls(Calls):
    async def spend(
        self,
        *,
        by: str,
        since: str | None = None,
        until: str | None = None,
        zone: str | None = None,
        team: str | None = None,
        user: str | None = None,
    ) -> spending.SpendView:
        """Report charges by group; times in ISO 8601, `zone` an IANA name."""
        params = plain({"by": by, "since": since, "until": until, "zone": zone, "team": team, "user": user})
        return await self._call("GET", "/v1/spend", spending.SpendView, params=params)

    async def charges(self, *, cloud: str, since: str | None, until: str | None) -> spending.ChargeList:
        """List charges by machine, to compare them with an invoice."""
        params = plain({"cloud": cloud, "since": since, "until": until})
        return await self._call("GET", "/v1/charges", spending.ChargeList, params=params)

    async def calibration(self, *, since: str | None = None, until: str | None = None) -> spending.CalibrationView:
        """Report how well forecasts of finished jobs held; times in ISO 8601."""
        params = plain({"since": since, "until": until})
        return await self._call("GET", "/v1/calibration", spending.CalibrationView, params=params)

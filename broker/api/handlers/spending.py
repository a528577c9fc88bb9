"""Handlers: spending, and the record of forecasts."""

from broker.api.http.context import SERVICE
from broker.api.http.openapi import Api, Call
from broker.api.schemas import spending
from broker.api.schemas.queries import CalibrationParameters, ChargesParameters, SpendParameters
from broker.api.service.spending import SpendQuery

api = Api()


@api.op("GET", "/v1/spend", scope="read")
async def spend(call: Call, query: SpendParameters) -> spending.SpendView:
    """Report charges by job, user, team, cloud, GPU, day or month, with the cost of alternatives."""
    spend_query = SpendQuery(**query.model_dump())
    window, report = await call.request.app[SERVICE].spending.spend(call.caller, spend_query)
    rows = tuple(spending.SpendRowView.model_validate(row) for row in report.rows)
    total = spending.SpendRowView.model_validate(report.total)
    return spending.SpendView(
        by=report.by, since=window.since, until=window.until, zone=window.zone, rows=rows, total=total
    )


@api.op("GET", "/v1/charges", scope="read")
async def charges(call: Call, query: ChargesParameters) -> spending.ChargeList:
    """List the charges of each machine of a cloud, to compare them with its invoice."""
    service = call.request.app[SERVICE].spending
    window, machines = await service.charges(call.caller, query.cloud, query.since, query.until)
    items = tuple(spending.ChargeView.model_validate(machine) for machine in machines)
    return spending.ChargeList(cloud=query.cloud, since=window.since, until=window.until, items=items)


@api.op("GET", "/v1/calibration", scope="read")
async def calibration(call: Call, query: CalibrationParameters) -> spending.CalibrationView:
    """Report how many finished jobs stayed within the P90 of their quote, and the median errors."""
    service = call.request.app[SERVICE].spending
    window, report = await service.calibration(call.caller, query.since, query.until)
    rows = tuple(spending.CalibrationRowView.model_validate(row) for row in report.rows)
    total = spending.CalibrationRowView.model_validate(report.total)
    return spending.CalibrationView(since=window.since, until=window.until, rows=rows, total=total)

"""`gpubroker offers`: current offers, their history, and its export as spot traces."""

from pathlib import Path
from typing import Annotated, Any

import typer

from broker.api.schemas.offers import OfferHistoryView, OfferList, OfferSeriesView, PricePoint
from broker.api.service.spec_inputs import unknown_name
from broker.cli.core.command import Json, client, command
from broker.cli.core.durations import days as days_of
from broker.cli.core.durations import names as names_of
from broker.cli.core.exit_codes import BadInput
from broker.cli.core.output import Output
from broker.cli.views import offer_history, spot_trace
from broker.cli.views import offers as offers_view
from broker.client.async_client import AsyncClient
from broker.domain.gpu_names import gpu_name
from broker.estimator.speed.hardware import matches
from broker.sizing.estimate import EstimateError, hardware_of

WINDOW_DAYS = 7
"""Days of one request of an export, at one point for each bucket of five minutes."""
WINDOW_POINTS = WINDOW_DAYS * 288 + 1
WINDOW_SERIES = 13
"""Series of one request of an export: the daemon answers with at most 27,000 points."""
MAX_DAYS = 90
"""Days for which the daemon keeps the history."""
MAX_GROUPS = 500
"""Maximum number of series of one export."""

Gpus = Annotated[
    list[str] | None,
    typer.Option("--gpu", "-g", help="Only these GPUs, comma-separated: H100,A100-80GB,L40S,RTX4090."),
]
Clouds = Annotated[list[str] | None, typer.Option("--cloud", help="History: only this cloud. Repeatable.")]
Regions = Annotated[list[str] | None, typer.Option("--region", help="History: only this region. Repeatable.")]
Market = Annotated[str | None, typer.Option(help="History: only this market.", metavar="spot|on-demand")]
Count = Annotated[int | None, typer.Option("--gpus", min=1, help="History: only machines with this number of GPUs.")]


@command
async def offers(
    context: typer.Context,
    provider: Annotated[str | None, typer.Option(help="Only this provider.")] = None,
    gpu: Gpus = None,
    limit: Annotated[int | None, typer.Option(min=1, max=5000, help="Number of offers; default 500.")] = None,
    history: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Show prices and availability of this long until now, as 7d; needs --gpu."),
    ] = None,
    cloud: Clouds = None,
    region: Regions = None,
    market: Market = None,
    gpus: Count = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="History: write every point as CSV.")] = False,
    as_json: Json = False,
) -> None:
    """List current offers, cheapest first, with the age and the source of each price."""
    if context.invoked_subcommand is not None:
        return
    out, names = Output(as_json=as_json), names_of(gpu or [])
    where = {"cloud": cloud or [], "region": region or [], "market": market, "gpus": gpus}
    if history is None:
        _check_unused({**where, "csv": as_csv})
        return await _current(out, provider, names, limit or 500)
    _check_unused({"provider": provider}, "takes no part in --history; use --cloud")
    async with client() as c:
        page = await _history(
            c, names, days=days_of("--history", history, max_days=MAX_DAYS), limit=min(limit or 50, MAX_GROUPS), **where
        )
    out.document(page)
    if as_csv and not as_json:
        out.log(offer_history.as_csv(page))
    else:
        offer_history.show(out, page)


@command
async def export(
    folder: Annotated[Path, typer.Argument(help="Folder for the traces; existing files are replaced.")],
    gpu: Gpus = None,
    days: Annotated[str, typer.Option(metavar="TIME", help="Length of the history until now.")] = "90d",
    cloud: Clouds = None,
    region: Regions = None,
    gpus: Count = None,
    as_json: Json = False,
) -> None:
    """Export the recorded history of spot offers as traces, one CSV file for each GPU, count and region."""
    out = Output(as_json=as_json)
    where: dict[str, Any] = {"cloud": cloud or [], "region": region or [], "gpus": gpus}
    count = days_of("--days", days, max_days=MAX_DAYS)
    async with client() as c:
        page = await _history(c, names_of(gpu or []), days=count, points=1, limit=MAX_GROUPS, **where)
        if page.total > MAX_GROUPS:
            raise BadInput(f"{page.total} series match, at most {MAX_GROUPS} are exported; narrow them by --cloud")
        prices, traces = spot_trace.on_demand_prices(page.items), list[spot_trace.SpotTrace]()
        for item in (item for item in page.items if item.spot):
            traces += spot_trace.traces(item, await _points(c, item, page, count), prices)
    files = spot_trace.write(folder, traces)
    out.document({"folder": str(folder), "files": files})
    out.print(f"{len(files)} traces in {folder}" if files else "no spot offer was recorded with an on-demand price")


async def _current(out: Output, provider: str | None, names: list[str], limit: int) -> None:
    async with client() as c:
        page = await c.offers(provider=provider, accelerators=names, limit=limit)
    _check_names(page, provider, names)
    out.document(page)
    offers_view.show(out, page)


async def _history(client: AsyncClient, gpu: list[str], **where: Any) -> OfferHistoryView:
    """Return the history of GPUs. Raises BadInput for none, and for an unknown GPU without history."""
    if not gpu:
        raise BadInput("--gpu: name the GPUs of the history, for example --gpu H100")
    page = await client.offer_history(gpu=gpu, **where)
    if not page.total:
        for name in gpu:
            _check_gpu(name)
    return page


async def _points(client: AsyncClient, item: OfferSeriesView, page: OfferHistoryView, days: int) -> list[PricePoint]:
    """Return every bucket of a series in the order of time."""
    points: dict[Any, PricePoint] = {}
    for until in spot_trace.window_ends(page.until, days, WINDOW_DAYS):
        part = await client.offer_history(
            gpu=[item.accelerator], cloud=[item.cloud], region=[item.region], market="spot", gpus=item.gpus,
            days=WINDOW_DAYS, until=until.isoformat(), points=WINDOW_POINTS, limit=WINDOW_SERIES,
        )  # fmt: skip
        same = (other for other in part.items if spot_trace.group_of(other) == spot_trace.group_of(item))
        points |= {point.at: point for other in same for point in other.points}
    return [points[at] for at in sorted(points) if at >= page.since]


def _check_unused(options: dict[str, Any], fault: str = "needs --history") -> None:
    for name, value in options.items():
        if value:
            raise BadInput(f"--{name} {fault}")


def _check_names(page: OfferList, provider: str | None, gpus: list[str]) -> None:
    """Raise BadInput for an unknown provider or GPU, whose empty list would look like a sold-out market."""
    providers = [status.name for status in page.providers]
    if provider is not None and provider not in providers:
        raise BadInput(f"--provider: {unknown_name('provider', provider, sorted(providers), 'configured')}")
    if page.total > len(page.items):  # an unlisted, more expensive offer may have the GPU
        return
    for name in gpus:
        if not any(matches(gpu_name(name), offer.accelerator) for offer in page.items):
            _check_gpu(name)


def _check_gpu(name: str) -> None:
    """Raise BadInput for a GPU that no table knows."""
    try:
        hardware_of(name)
    except EstimateError as e:
        raise BadInput(str(e)) from None

"""Pages of the market and of money: offers, spending, budgets and the record of forecasts."""

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, get_args

from aiohttp import web
from pydantic import BaseModel, ValidationError

from broker.api.core import problems
from broker.api.schemas.offers import OfferHistoryView
from broker.api.schemas.queries import CalibrationParameters, OfferHistoryQuery, OffersQuery, SpendParameters
from broker.api.service import offers as listing
from broker.api.service import views
from broker.api.service.spending import SpendQuery
from broker.domain.errors import Busy, InvalidInput
from broker.domain.offer import Offer
from broker.domain.spec import Name
from broker.domain.spending import SpendBy, error_text, within_text
from broker.web.browser import Visit
from broker.web.price_view import price_lines
from broker.web.routes import Routes

routes = Routes()
OFFERS = 200
HISTORY_DAYS = 7
HISTORY_POINTS = HISTORY_DAYS * 24 + 1
"""Maximum number of points of a price line: one an hour, both ends included."""
HISTORY_SERIES = 150
"""Maximum number of recorded series that are read for the price lines, the cheapest first."""
HISTORY_GPUS = 8
"""Maximum number of GPUs whose history is read at once."""


class OffersPageQuery(OffersQuery):
    """Filters of the page of offers."""

    cloud: Name | None = None
    market: Literal["spot", "on-demand"] | None = None

    def accepts(self, offer: Offer) -> bool:
        return self.cloud in (None, offer.cloud) and self.market in (None, "spot" if offer.spot else "on-demand")


@dataclass(frozen=True, kw_only=True)
class GpuGroup:
    """Offers of one GPU, over all clouds."""

    accelerator: str
    memory_bytes: int
    offers: int
    clouds: tuple[str, ...]
    spot: Decimal | None
    """Minimum dollars an hour of one GPU on spot; None: none is for sale."""
    on_demand: Decimal | None


def grouped(offers: Iterable[Offer]) -> list[GpuGroup]:
    """Return the offers by GPU, the cheapest first; prices are of one GPU."""
    by_gpu: dict[str, list[Offer]] = {}
    for offer in offers:
        by_gpu.setdefault(offer.accelerator, []).append(offer)
    groups = [_group(name, members) for name, members in by_gpu.items()]
    return sorted(groups, key=lambda group: min(p for p in (group.spot, group.on_demand) if p is not None))


def _group(name: str, members: list[Offer]) -> GpuGroup:
    def least(is_spot: bool) -> Decimal | None:
        return min((o.usd_per_hour / max(1, o.gpus) for o in members if o.spot is is_spot), default=None)

    clouds = tuple(sorted({offer.cloud for offer in members}))
    memory = max(offer.gpu_memory_bytes for offer in members)
    return GpuGroup(
        accelerator=name, memory_bytes=memory, offers=len(members), clouds=clouds, spot=least(True),
        on_demand=least(False),
    )  # fmt: skip


def _query(visit: Visit, model: type[BaseModel], repeated: tuple[str, ...] = ()) -> tuple[Any, dict[str, Any]]:
    """Return (the validated query or None, the query as given). Raises InvalidInput."""
    parameters = visit.request.query
    filters: dict[str, Any] = {
        name: parameters.getall(name) if name in repeated else parameters[name]
        for name in model.model_fields
        if parameters.get(name)
    }
    try:
        return model.model_validate(filters), filters
    except ValidationError as error:
        raise problems.invalid_input_of(error, model, filters, root="query") from None


@routes.get("/ui/offers")
async def offers(visit: Visit) -> web.Response:
    """Show what is for sale: by GPU, then the prices of seven days, the cheapest offers, and each provider's state."""
    query, filters = _query(visit, OffersPageQuery, ("accelerator",))
    market, accelerators = visit.service.quotes.market, query.accelerator
    listed = listing.matching_offers(market, provider=query.provider, accelerators=accelerators)
    matching = [offer for offer in listed if query.accepts(offer)]
    history, fault = await _history(visit, query)
    return visit.page(
        "offers.html",
        chosen=filters,
        groups=grouped(matching),
        offers=matching[:OFFERS],
        total=len(matching),
        providers=market.status(),
        clouds=sorted({offer.cloud for offer in market.offers()}),
        days=HISTORY_DAYS,
        history=history,
        history_fault=fault,
        lines=price_lines(history) if history else (),
    )


async def _history(visit: Visit, query: OffersPageQuery) -> tuple[OfferHistoryView | None, str]:
    """Return (the recorded prices of the chosen GPUs, why they were not read); (None, ""): no GPU is chosen."""
    if not query.accelerator:
        return None, ""
    if len(query.accelerator) > HISTORY_GPUS:
        return None, f"Choose at most {HISTORY_GPUS} kinds of GPU for their prices over {HISTORY_DAYS} days."
    where = OfferHistoryQuery(
        gpu=query.accelerator, cloud=() if query.cloud is None else (query.cloud,), market=query.market,
        days=HISTORY_DAYS, points=HISTORY_POINTS, limit=HISTORY_SERIES,
    )  # fmt: skip
    try:
        return await visit.service.offer_history.history(visit.caller, where), ""
    except Busy as error:
        return None, str(error)


@routes.get("/ui/spend")
async def spend(visit: Visit) -> web.Response:
    """Show spending by the group that the URL names, and the use of every budget."""
    values: dict[str, Any] = {"ways": get_args(SpendBy), "report": None, "window": None, "faults": {}, "budgets": ()}
    parameters = visit.request.query
    values["chosen"] = {"by": "job"} | {
        name: parameters[name] for name in ("by", "since", "until") if parameters.get(name)
    }
    try:
        query, _ = _query(visit, SpendParameters)
        window, report = await visit.service.spending.spend(visit.caller, SpendQuery(**query.model_dump()))
    except InvalidInput as error:
        values["faults"] = {problem.field: problem.message for problem in error.problems}
        return visit.page("spend.html", 422, **values)
    budgets = views.budget_list(*await visit.service.policies.budgets(visit.caller))
    return visit.page("spend.html", **(values | {"report": report, "window": window, "budgets": budgets.items}))


@routes.get("/ui/spend/calibration")
async def calibration(visit: Visit) -> web.Response:
    """Show how many finished jobs stayed within the P90 of their quote, and the median errors."""
    given = visit.request.query
    values: dict[str, Any] = {"report": None, "window": None, "faults": {}}
    values |= {"within_text": within_text, "error_text": error_text}
    values["chosen"] = {name: given[name] for name in ("since", "until") if given.get(name)}
    try:
        query, _ = _query(visit, CalibrationParameters)
        window, report = await visit.service.spending.calibration(visit.caller, query.since, query.until)
    except InvalidInput as error:
        values["faults"] = {problem.field: problem.message for problem in error.problems}
        return visit.page("calibration.html", 422, **values)
    return visit.page("calibration.html", **(values | {"report": report, "window": window}))

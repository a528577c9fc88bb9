"""QuoteService, OfferService, ProviderService and BudgetService."""

from broker.api.grpc.codec import fill_message, parse
from broker.api.grpc.interceptor import GrpcCall, scope
from broker.api.proto.gpubroker.v1 import (
    budget_service_pb2,
    budget_service_pb2_grpc,
    offer_service_pb2,
    offer_service_pb2_grpc,
    provider_service_pb2,
    provider_service_pb2_grpc,
    quote_service_pb2,
    quote_service_pb2_grpc,
)
from broker.api.proto.gpubroker.v1 import offer_pb2 as offer
from broker.api.proto.gpubroker.v1 import quote_pb2 as quote
from broker.api.schemas.queries import OfferHistoryQuery, OffersQuery, QuoteQuery
from broker.api.schemas.quotes import QuoteSpec
from broker.api.service import offers, views
from broker.api.service.jobs import Service


class QuoteServicer(quote_service_pb2_grpc.QuoteServiceServicer):
    def __init__(self, service: Service) -> None:
        self._service = service

    @scope("read")
    async def CreateQuote(
        self, request: quote_service_pb2.CreateQuoteRequest, call: GrpcCall
    ) -> quote_service_pb2.CreateQuoteResponse:
        limit = parse(request, QuoteQuery).limit
        result = await self._service.quotes.quote(call.caller, parse(request.spec, QuoteSpec))
        return quote_service_pb2.CreateQuoteResponse(quote=fill_message(quote.Quote(), views.quote(*result, limit)))


class OfferServicer(offer_service_pb2_grpc.OfferServiceServicer):
    def __init__(self, service: Service) -> None:
        self._service = service

    @scope("read")
    async def ListOffers(
        self, request: offer_service_pb2.ListOffersRequest, call: GrpcCall
    ) -> offer_service_pb2.ListOffersResponse:
        query = parse(request, OffersQuery)
        listing = offers.for_sale(
            self._service.quotes.market, provider=query.provider, accelerators=query.accelerator, limit=query.limit
        )
        return fill_message(offer_service_pb2.ListOffersResponse(), listing)

    @scope("read")
    async def GetOfferHistory(
        self, request: offer_service_pb2.GetOfferHistoryRequest, call: GrpcCall
    ) -> offer_service_pb2.GetOfferHistoryResponse:
        history = await self._service.offer_history.history(call.caller, parse(request, OfferHistoryQuery))
        return fill_message(offer_service_pb2.GetOfferHistoryResponse(), history)


class ProviderServicer(provider_service_pb2_grpc.ProviderServiceServicer):
    def __init__(self, service: Service) -> None:
        self._service = service

    @scope("read")
    async def ListProviders(
        self, request: provider_service_pb2.ListProvidersRequest, call: GrpcCall
    ) -> provider_service_pb2.ListProvidersResponse:
        listing = offers.providers(self._service.quotes.market, {})
        return provider_service_pb2.ListProvidersResponse(
            items=[fill_message(offer.Provider(), p) for p in listing.items]
        )

    @scope("admin")
    async def CheckProviders(
        self, request: provider_service_pb2.CheckProvidersRequest, call: GrpcCall
    ) -> provider_service_pb2.CheckProvidersResponse:
        listing = offers.providers(self._service.quotes.market, await self._service.check_providers())
        return provider_service_pb2.CheckProvidersResponse(
            items=[fill_message(offer.Provider(), p) for p in listing.items]
        )


class BudgetServicer(budget_service_pb2_grpc.BudgetServiceServicer):
    def __init__(self, service: Service) -> None:
        self._service = service

    @scope("read")
    async def ListBudgets(
        self, request: budget_service_pb2.ListBudgetsRequest, call: GrpcCall
    ) -> budget_service_pb2.ListBudgetsResponse:
        budgets = await self._service.policies.budgets(call.caller)
        return fill_message(budget_service_pb2.ListBudgetsResponse(), views.budget_list(*budgets))

"""BudgetService."""

from broker.api.grpc.codec import fill
from broker.api.grpc.interceptor import GrpcCall, scope
from broker.api.handlers.policies import budget_list
from broker.api.proto.gpubroker.v1 import budget_service_pb2 as pb
from broker.api.proto.gpubroker.v1 import budget_service_pb2_grpc as stubs
from broker.api.service.jobs import Service


class BudgetServicer(stubs.BudgetServiceServicer):
    def __init__(self, service: Service) -> None:
        self._service = service

    @scope("read")
    async def ListBudgets(self, request: pb.ListBudgetsRequest, call: GrpcCall) -> pb.ListBudgetsResponse:
        found = await self._service.policies.budgets(call.caller)
        return fill(pb.ListBudgetsResponse(), budget_list(*found))

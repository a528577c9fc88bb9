"""HTTP and gRPC calls of a token share one rate limit."""

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from broker.api.core.auth import Authenticator
from broker.api.grpc.server import serving as serving_grpc
from broker.api.http.context import AUTH
from broker.api.proto.gpubroker.v1 import offer_service_pb2, offer_service_pb2_grpc
from broker.runtime.clock import SystemClock
from broker.runtime.token_bucket import TokenBucketRate
from tests.api.harness import memory_blobs, serving
from tests.conformance.samples import ManualClock
from tests.parity.servers import parts
from tests.support.memory_store.store import MemoryStore


async def test_both_apis_share_one_rate_limit() -> None:
    clock = ManualClock()
    async with serving(MemoryStore(SystemClock()), memory_blobs()) as api:
        auth: Authenticator = api.app[AUTH]
        auth._clock, auth._rate = clock, TokenBucketRate(per_s=0.25, burst=2)
        ada = await api.token("ada", "read")
        async with (
            serving_grpc(parts(api), "127.0.0.1", 0, grace_s=0) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            offers = offer_service_pb2_grpc.OfferServiceStub(channel)
            metadata = (("authorization", ada["Authorization"]),)
            await api.call("GET", "/v1/offers", ada, 200)
            await offers.ListOffers(offer_service_pb2.ListOffersRequest(), metadata=metadata)
            await api.call("GET", "/v1/offers", ada, 429)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await offers.ListOffers(offer_service_pb2.ListOffersRequest(), metadata=metadata)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    (details,) = [value for key, value in refused.value.trailing_metadata() or () if key == "grpc-status-details-bin"]
    wait = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(wait) for detail in status_pb2.Status.FromString(details).details)
    assert wait.retry_delay.ToSeconds() == 4

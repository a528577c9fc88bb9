"""The gRPC server: the same use cases as HTTP, on its own port."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from broker.api.core.auth import Authenticator
from broker.api.core.metrics import Metrics
from broker.api.core.readiness import Readiness
from broker.api.core.stream_limits import MAX_CONNECTIONS, Streams, bounded_connections
from broker.api.grpc.anonymous_limits import HEALTH
from broker.api.grpc.artifacts import ArtifactServicer
from broker.api.grpc.health import HealthServicer
from broker.api.grpc.interceptor import AuthInterceptor
from broker.api.grpc.jobs import JobServicer
from broker.api.grpc.market import BudgetServicer, OfferServicer, ProviderServicer, QuoteServicer
from broker.api.proto.gpubroker.v1 import (
    artifact_service_pb2,
    artifact_service_pb2_grpc,
    budget_service_pb2,
    budget_service_pb2_grpc,
    job_service_pb2,
    job_service_pb2_grpc,
    offer_service_pb2,
    offer_service_pb2_grpc,
    provider_service_pb2,
    provider_service_pb2_grpc,
    quote_service_pb2,
    quote_service_pb2_grpc,
)
from broker.api.service.content import Content
from broker.api.service.job_feed import JobMetricsReader
from broker.api.service.jobs import Service

FILES = (
    artifact_service_pb2,
    budget_service_pb2,
    job_service_pb2,
    offer_service_pb2,
    provider_service_pb2,
    quote_service_pb2,
)
SERVICES = frozenset(service.full_name for file in FILES for service in file.DESCRIPTOR.services_by_name.values())

MESSAGE_BYTES = 4 * 1024**2
METADATA_BYTES = 16 * 1024
OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),  # unlimited: the client limits what it receives
    ("grpc.max_concurrent_streams", 256),  # per connection
    ("grpc.max_metadata_size", METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES),  # between the two, gRPC refuses at random
    ("grpc.compression_enabled_algorithms_bitset", 1),  # identity alone: no message is inflated
    ("grpc.so_reuseport", 0),  # otherwise two daemons could share a port, and each would get half of the calls
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 2),
    ("grpc.server_handshake_timeout_ms", 20_000),  # time for the HTTP/2 preface
)
CALLS_AT_ONCE = 4096
"""Maximum number of open calls of all connections, followers included. Others are refused: RESOURCE_EXHAUSTED."""


class AddressUnavailable(Exception):
    """The server cannot listen on the address."""


@dataclass(frozen=True, kw_only=True)
class GrpcDependencies:
    """Objects that the gRPC server shares with the HTTP application."""

    service: Service
    content: Content
    job_metrics: JobMetricsReader
    auth: Authenticator
    metrics: Metrics
    readiness: Readiness
    streams: Streams


@asynccontextmanager
async def serving(
    parts: GrpcDependencies,
    host: str,
    port: int,
    *,
    reflects: bool = False,
    credentials: grpc.ServerCredentials | None = None,
    connections: int = MAX_CONNECTIONS,
    grace_s: float = 2.0,
) -> AsyncIterator[int]:
    """Serve until the body exits, then wait `grace_s` for running calls. Yield the bound port.

    `port` 0 binds a free port. Raises AddressUnavailable.
    """
    doorkeeper = AuthInterceptor(parts.auth, parts.streams, parts.metrics)
    options = (*OPTIONS, ("grpc.max_allowed_incoming_connections", bounded_connections(connections)))
    server = grpc.aio.server(interceptors=[doorkeeper], options=options, maximum_concurrent_rpcs=CALLS_AT_ONCE)
    jobs = JobServicer(parts.service, parts.content, parts.job_metrics)
    job_service_pb2_grpc.add_JobServiceServicer_to_server(jobs, server)
    quote_service_pb2_grpc.add_QuoteServiceServicer_to_server(QuoteServicer(parts.service), server)
    offer_service_pb2_grpc.add_OfferServiceServicer_to_server(OfferServicer(parts.service), server)
    provider_service_pb2_grpc.add_ProviderServiceServicer_to_server(ProviderServicer(parts.service), server)
    budget_service_pb2_grpc.add_BudgetServiceServicer_to_server(BudgetServicer(parts.service), server)
    artifact_service_pb2_grpc.add_ArtifactServiceServicer_to_server(ArtifactServicer(parts.content), server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(parts.readiness, SERVICES), server)
    if reflects:
        reflection.enable_server_reflection((*SERVICES, HEALTH, reflection.SERVICE_NAME), server)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise AddressUnavailable(str(error)) from None
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(grace_s)

"""Listening sockets of the HTTP and gRPC APIs."""

import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from aiohttp import web

from broker.api.grpc.server import AddressUnavailable, GrpcDependencies, serving
from broker.api.http.connections import Runner
from broker.api.http.context import AUTH, CONTENT, JOB_METRICS, METRICS, READINESS, SERVICE, STREAMS
from broker.daemon.config import DaemonConfig
from broker.daemon.tls import Certificate
from broker.domain.errors import GpubrokerError

DRAIN_S = 2.0
"""Seconds for which a stopping daemon waits for running answers."""
FILES = 16_384
MIN_OPEN_FILES = 256
"""Open files without which the daemon does not start: database, log, sockets and machines take about 100."""
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class CannotListen(GpubrokerError):
    """Raised if the address is in use or is not an address of this host."""


class TooFewFiles(GpubrokerError):
    """Raised if this process may open too few files to serve."""


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Addresses at which programs of this host reach the daemon. `url`: address of the HTTP API."""

    url: str
    grpc: str | None
    """`host:port` of the gRPC API; None: gRPC is off."""
    certificate: str | None
    """Path of the certificate of both APIs; None: both use plain text."""


@asynccontextmanager
async def listening(config: DaemonConfig, application: web.Application) -> AsyncIterator[Addresses]:
    """Listen on HTTP and gRPC while the context is open.

    Raises CannotListen naming the address and the fix, InvalidInput for a certificate that cannot be used.
    """
    await application[READINESS].read_mark()
    certificate = Certificate(config.tls.certificate, config.tls.key) if config.tls else None
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(_http(config, application, certificate))
        scheme = "http" if certificate is None else "https"
        url = f"{scheme}://{_address(config.host, port)}"
        certificate_path = str(config.tls.certificate.absolute()) if config.tls else None
        grpc_port = config.grpc_port
        if grpc_port is None:
            yield Addresses(url=url, grpc=None, certificate=certificate_path)
            return
        bound = await stack.enter_async_context(_grpc(config, grpc_port, application, certificate))
        yield Addresses(url=url, grpc=_address(config.grpc_host, bound), certificate=certificate_path)


def allow_files() -> None:
    """Raise the limit of open files: most systems allow 1024 by default, and each connection takes one.

    Raises TooFewFiles.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < MIN_OPEN_FILES:
        raise TooFewFiles(
            f"the daemon may open {hard} files only, and needs {MIN_OPEN_FILES}: raise the limit (ulimit -n {FILES}, "
            f"or LimitNOFILE={FILES} in its systemd unit)"
        )
    limit = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


@asynccontextmanager
async def _http(
    config: DaemonConfig, application: web.Application, certificate: Certificate | None
) -> AsyncIterator[int]:
    runner = Runner(application, shutdown_timeout=DRAIN_S)
    await runner.setup()
    try:
        context = None if certificate is None else certificate.context()
        try:
            await web.TCPSite(runner, config.host, config.port, ssl_context=context).start()
        except OSError as e:
            raise CannotListen(
                f"cannot listen on {config.host}:{config.port}: {e.strerror}; choose another with --port"
            ) from None
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _grpc(
    config: DaemonConfig, port: int, application: web.Application, certificate: Certificate | None
) -> AsyncIterator[int]:
    parts = GrpcDependencies(
        service=application[SERVICE],
        content=application[CONTENT],
        job_metrics=application[JOB_METRICS],
        auth=application[AUTH],
        metrics=application[METRICS],
        readiness=application[READINESS],
        streams=application[STREAMS],
    )
    credentials = None if certificate is None else _credentials(certificate)
    host, reflects = config.grpc_host, config.grpc.reflection
    grpc_server = serving(parts, host, port, reflects=reflects, credentials=credentials, grace_s=DRAIN_S)
    try:
        async with grpc_server as bound:
            yield bound
    except AddressUnavailable:
        raise CannotListen(
            f"cannot listen on {host}:{port} for gRPC; choose another with grpc.port, or null for none"
        ) from None


def _credentials(certificate: Certificate) -> grpc.ServerCredentials:
    """Return credentials that read the certificate at each handshake, so that a renewed certificate takes effect."""
    known = certificate.pem()

    def configuration() -> Any:
        """Return the new configuration, or None if the certificate is unchanged."""
        nonlocal known
        now = certificate.pem()
        if now == known:
            return None
        known = now
        return grpc.ssl_server_certificate_configuration([now])

    first = grpc.ssl_server_certificate_configuration([known])
    return grpc.dynamic_ssl_server_credentials(first, configuration)


def _address(host: str, port: int) -> str:
    host = ANYWHERE.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

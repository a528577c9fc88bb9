"""Certificates: over HTTP and gRPC, renewed without a restart, and no plaintext beyond loopback."""

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc

from broker.client.async_client import AsyncClient
from broker.client.transport.errors import DaemonUnreachable
from broker.daemon.config import DaemonConfig
from broker.daemon.listeners import Addresses, CannotListen, listening
from broker.daemon.tls import Certificate
from broker.domain.errors import InvalidInput
from broker.runtime.clock import SystemClock
from tests.api.harness import memory_blobs, serving
from tests.support.memory_store.store import MemoryStore


def issue(folder: Path, name: str, serial: int) -> None:
    """Write cert.pem and key.pem for localhost, each atomically."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for file, data in (("key.pem", key.private_bytes(pem, *plain)), ("cert.pem", certificate.public_bytes(pem))):
        (folder / f"{file}.new").write_bytes(data)
        os.replace(folder / f"{file}.new", folder / file)


@asynccontextmanager
async def doors(folder: Path) -> AsyncIterator[Addresses]:
    tls = {"certificate": folder / "cert.pem", "key": folder / "key.pem"}
    config = DaemonConfig.model_validate({"home": folder, "port": 0, "tls": tls})
    async with serving(MemoryStore(SystemClock()), memory_blobs()) as api, listening(config, api.app) as at:
        yield at


async def serial(address: str) -> int:
    """Return the serial number of the certificate at `address`."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(shown).serial_number


async def test_both_apis_show_the_certificate_and_its_renewal(tmp_path: Path) -> None:
    issue(tmp_path, "localhost", 1)
    async with doors(tmp_path) as at:
        assert at.url.startswith("https://")
        assert at.grpc is not None
        both = (at.url.removeprefix("https://"), at.grpc)
        assert [await serial(a) for a in both] == [1, 1]
        root = grpc.ssl_channel_credentials((tmp_path / "cert.pem").read_bytes())
        named = (("grpc.ssl_target_name_override", "localhost"),)
        async with grpc.aio.secure_channel(at.grpc, root, options=named) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        issue(tmp_path, "localhost", 2)
        assert [await serial(a) for a in both] == [2, 2]
        (tmp_path / "key.pem").write_text("half a ke")
        assert [await serial(a) for a in both] == [2, 2]
        issue(tmp_path, "localhost", 3)
        assert [await serial(a) for a in both] == [3, 3]


async def test_plaintext_is_not_spoken_where_there_is_a_certificate(tmp_path: Path) -> None:
    issue(tmp_path, "localhost", 1)
    async with doors(tmp_path) as at:
        assert at.grpc is not None
        async with grpc.aio.insecure_channel(at.grpc) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=300)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE


def test_files_that_are_no_pair_stop_the_start_in_one_line(tmp_path: Path) -> None:
    issue(tmp_path, "localhost", 1)
    missing, certificate, key = tmp_path / "none.pem", tmp_path / "cert.pem", tmp_path / "key.pem"
    other = tmp_path / "other"
    other.mkdir()
    issue(other, "localhost", 2)
    for pair in ((missing, key), (certificate, missing), (certificate, certificate), (certificate, other / "key.pem")):
        with pytest.raises(InvalidInput) as refused:
            Certificate(*pair)
        (problem,) = refused.value.problems
        assert problem.field == "tls"
        assert any(str(path) in problem.message for path in pair)
        assert "\n" not in problem.message


@pytest.mark.parametrize(
    "settings", [{"host": "0.0.0.0"}, {"host": "::"}, {"host": "broker.example"}, {"grpc": {"host": "192.0.2.1"}}]
)
def test_an_address_that_others_reach_needs_a_certificate(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "gpubroker.yaml").write_text(json.dumps(settings))
    with pytest.raises(InvalidInput) as refused:
        DaemonConfig.load(home=tmp_path, env={})
    (problem,) = refused.value.problems
    assert problem.field == ("grpc.host" if "grpc" in settings else "host")
    assert "is not a loopback address; give tls.certificate and tls.key" in problem.message
    tls = {"certificate": tmp_path / "c", "key": tmp_path / "k"}
    assert DaemonConfig.load(home=tmp_path, env={}, tls=tls, **settings).tls is not None


def test_loopback_needs_none_and_a_disabled_api_has_no_address(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        assert DaemonConfig.load(home=tmp_path, env={}, host=host).grpc_host == host
    off = DaemonConfig.load(home=tmp_path, env={}, grpc={"host": "0.0.0.0", "port": None})
    assert off.grpc_port is None


@pytest.mark.parametrize(
    ("settings", "port"),
    [({}, 7071), ({"port": 0}, 0), ({"port": 9000}, 9001), ({"port": 65535}, 0), ({"grpc": {"port": 5}}, 5)],
)
def test_grpc_listens_next_to_http(tmp_path: Path, settings: dict[str, Any], port: int) -> None:
    assert DaemonConfig.load(home=tmp_path, env={}, **settings).grpc_port == port


async def test_a_port_of_grpc_that_is_taken_is_reported_with_its_setting(tmp_path: Path) -> None:
    async with serving(MemoryStore(SystemClock()), memory_blobs()) as api:
        first = DaemonConfig.model_validate({"home": tmp_path, "port": 0})
        async with listening(first, api.app) as at:
            assert at.grpc is not None
            second = first.model_copy(update={"grpc": first.grpc.model_copy(update={"port": int(at.grpc[10:])})})
            with pytest.raises(CannotListen, match=r"grpc\.port"):
                async with listening(second, api.app):
                    pass


async def test_the_local_client_trusts_the_daemons_own_certificate_and_no_other(tmp_path: Path) -> None:
    issue(tmp_path, "broker.example", 1)
    async with doors(tmp_path) as at:
        assert at.certificate is not None
        async with AsyncClient(at.url, certificate=at.certificate) as client:
            assert (await client.ready()).status == "ok"
            issue(tmp_path, "broker.example", 2)
        async with AsyncClient(at.url, certificate=at.certificate) as client:
            assert (await client.ready()).status == "ok"
        other = tmp_path / "other"
        other.mkdir()
        issue(other, "broker.example", 3)
        for wrong in (str(other / "cert.pem"), "", str(tmp_path / "none.pem")):
            async with AsyncClient(at.url, certificate=wrong) as client:
                with pytest.raises(DaemonUnreachable):
                    await client.ready()

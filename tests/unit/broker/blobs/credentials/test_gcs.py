"""Google's token exchange: the documented requests, the boundary's rules, and the use of its answers."""

import base64
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from broker.blobs import GrantSettings, ObstoreBlobs
from broker.blobs.credentials.gcs import GcsIssuer, boundary, service_account
from broker.domain.errors import BlobsUnavailable
from broker.domain.ids import Installation
from tests.unit.broker.blobs.credentials.samples import ATTEMPT, FINAL, JOB, LEASE, NOW, READS, SCOPE, WRITES, now
from tests.unit.broker.blobs.credentials.token_service import TokenRequest, TokenService, serving
from trainer.objectstore.objects import Objects

OBJECTS = "projects/_/buckets/training/objects/"
ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"


@pytest.fixture(scope="module")
def key() -> RSAPrivateKey:
    return generate_private_key(65537, 2048)


def _account(key: RSAPrivateKey, token_uri: str) -> dict[str, str]:
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    return {
        "type": "service_account", "client_email": "daemon@project.iam.gserviceaccount.com", "private_key": pem,
        "private_key_id": "k1", "token_uri": token_uri,
    }  # fmt: skip


def _google(request: TokenRequest) -> tuple[int, Any]:
    if request.path == "/token":
        return 200, {"access_token": "the daemon's own", "expires_in": 3599, "token_type": "Bearer"}
    if request.path != "/v1/token":
        return 404, ""
    return 200, {"access_token": "downscoped", "issued_token_type": ACCESS_TOKEN, "token_type": "Bearer"}


def _part(text: str) -> Any:
    return json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))


async def test_the_own_token_is_exchanged_for_one_within_the_boundary(key: RSAPrivateKey) -> None:
    async with serving(_google) as service:
        issuer = GcsIssuer(account=_account(key, f"{service.url}/token"), exchange=f"{service.url}/v1/token", now=now)
        issued = await issuer.issue(SCOPE)
        own, exchange = service.requests
    assert own.form["grant_type"] == "urn:ietf:params:oauth:grant-type:jwt-bearer"
    header, claims, signature = own.form["assertion"].split(".")
    assert _part(header) == {"alg": "RS256", "typ": "JWT", "kid": "k1"}
    assert _part(claims) == {
        "iss": "daemon@project.iam.gserviceaccount.com",
        "scope": "https://www.googleapis.com/auth/devstorage.read_write",
        "aud": f"{service.url}/token", "iat": int(NOW.timestamp()), "exp": int(NOW.timestamp()) + 3600,
    }  # fmt: skip
    signed = base64.urlsafe_b64decode(signature + "=" * (-len(signature) % 4))
    key.public_key().verify(signed, f"{header}.{claims}".encode(), PKCS1v15(), SHA256())
    assert (exchange.method, exchange.path) == ("POST", "/v1/token")
    form = exchange.form
    assert json.loads(form.pop("options")) == {"accessBoundary": {"accessBoundaryRules": boundary(SCOPE)}}
    assert form == {
        "grant_type": "urn:ietf:params:oauth:grant-type:token-exchange", "requested_token_type": ACCESS_TOKEN,
        "subject_token_type": ACCESS_TOKEN, "subject_token": "the daemon's own",
    }  # fmt: skip
    assert issued.options == {"google_bearer_token": "downscoped"}
    assert issued.expires_at == NOW + timedelta(seconds=3599)


def test_the_boundary_names_what_may_be_read_written_created_and_listed() -> None:
    view, use, create = boundary(SCOPE)
    assert {rule["availableResource"] for rule in (view, use, create)} == {
        "//storage.googleapis.com/projects/_/buckets/training"
    }
    said = [(rule["availablePermissions"], _conditions(rule)) for rule in (view, use, create)]
    lists = "api.getAttribute('storage.googleapis.com/objectListPrefix', '').startsWith"
    assert said[0] == (
        ["inRole:roles/storage.objectViewer"],
        {f"resource.name.startsWith('{OBJECTS}{prefix}')" for prefix in READS}
        | {f"resource.name == '{OBJECTS}{LEASE}'"}
        | {f"{lists}('{prefix}')" for prefix in READS if not prefix.endswith(".")},
    )
    assert said[1] == (
        ["inRole:roles/storage.objectUser"], {f"resource.name.startsWith('{OBJECTS}{prefix}')" for prefix in WRITES},
    )  # fmt: skip
    assert said[2] == (["inRole:roles/storage.objectCreator"], {f"resource.name == '{OBJECTS}{FINAL}'"})


def _conditions(rule: dict[str, Any]) -> set[str]:
    return set(rule["availabilityCondition"]["expression"].split(" || "))


@pytest.mark.parametrize("at", ["/token", "/v1/token"])
@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (400, {"error": "invalid_grant", "error_description": "Invalid JWT"}, "400 invalid_grant Invalid JWT; give"),
        (500, "oops", "500 with an answer that is not what is documented"),
        (200, {"token_type": "Bearer"}, "200 with an answer that is not what is documented"),
    ],
)
async def test_a_refusal_is_one_line_without_secrets(
    key: RSAPrivateKey, at: str, status: int, body: Any, words: str
) -> None:
    async with serving(lambda request: (status, body) if request.path == at else _google(request)) as service:
        issuer = GcsIssuer(account=_account(key, f"{service.url}/token"), exchange=f"{service.url}/v1/token", now=now)
        with pytest.raises(BlobsUnavailable) as error:
            await issuer.issue(SCOPE)
    assert words in str(error.value)
    assert "PRIVATE" not in str(error.value) + repr(issuer)


async def test_the_instance_sends_the_downscoped_token(key: RSAPrivateKey, tmp_path: Path) -> None:
    async with serving(_google) as service:
        (tmp_path / "key.json").write_text(json.dumps(_account(key, f"{service.url}/token")))
        access = await _store(service, tmp_path / "key.json").grant(JOB, ATTEMPT)
        assert access.scoped
        assert set(access.options) == {"google_base_url", "google_bearer_token"}
        service.requests.clear()
        assert await Objects.open(access.url, access.options, "abcd").read("broker/lease") is None
        assert service.requests[0].headers["authorization"] == "Bearer downscoped"


def _store(service: TokenService, path: Path) -> ObstoreBlobs:
    options = {"google_service_account": str(path), "google_base_url": service.url}
    settings = GrantSettings(google_exchange=f"{service.url}/v1/token", now=now)
    return ObstoreBlobs.open("gs://training", Installation("abcd"), options=options, grants=settings)


def test_a_service_account_is_found_as_text_or_file(key: RSAPrivateKey, tmp_path: Path) -> None:
    account, file = _account(key, "https://x"), tmp_path / "key.json"
    file.write_text(json.dumps(account))
    assert service_account({"google_service_account_key": json.dumps(account)}) == account
    assert service_account({"google_application_credentials": str(file)}) == account
    file.write_text('{"type": "authorized_user", "refresh_token": "x"}')
    assert service_account({"google_application_credentials": str(file)}) is None
    file.write_text("not JSON")
    assert service_account({"google_service_account": str(file)}) is None
    assert service_account({"google_service_account": str(tmp_path / "absent")}) is None
    assert service_account({}) is None

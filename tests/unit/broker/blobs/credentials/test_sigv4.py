"""The signature is the one that botocore makes."""

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from broker.blobs.credentials import sigv4
from tests.unit.broker.blobs.credentials.samples import NOW

BODY = b"Action=AssumeRole&Version=2011-06-15&Policy=%7B%22a%22%3A%22b+c%22%7D"


@pytest.mark.parametrize("token", [None, "a-session-token"])
@pytest.mark.parametrize("url", ["https://sts.eu-west-1.amazonaws.com/", "http://127.0.0.1:5000", "http://h:1/sts/x"])
def test_the_signature_equals_botocores(monkeypatch: pytest.MonkeyPatch, url: str, token: str | None) -> None:
    keys = sigv4.Keys(access_key="AKIDEXAMPLE", secret_key="wJalrXUtnFEMI/K7MDENG", session_token=token)
    ours = sigv4.signed_headers(url, BODY, keys, region="eu-west-1", service="sts", now=NOW)

    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda: NOW.replace(tzinfo=None))
    request = AWSRequest(method="POST", url=url, data=BODY, headers={"Content-Type": sigv4.FORM})
    SigV4Auth(Credentials(keys.access_key, keys.secret_key, token), "sts", "eu-west-1").add_auth(request)
    assert ours["authorization"] == request.headers["Authorization"]
    assert ours["x-amz-date"] == request.headers["X-Amz-Date"]
    assert ours.get("x-amz-security-token") == token


def test_secrets_do_not_show() -> None:
    assert "hidden" not in repr(sigv4.Keys(access_key="a", secret_key="hidden", session_token="hidden too"))

"""Meaning of AWS's errors for a request."""

import pytest
from botocore import exceptions as boto

from broker.domain.errors import Gone, NoCapacity, OutcomeUnknown, ProviderError, Rejected, Throttled
from providers.aws.api import error_for_code, error_for_exception


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("UnauthorizedOperation", 403, Rejected), ("AuthFailure", 401, Rejected), ("ExpiredToken", 400, Rejected),
        ("RequestExpired", 400, Rejected), ("OptInRequired", 401, Rejected), ("VcpuLimitExceeded", 400, Rejected),
        ("MaxSpotInstanceCountExceeded", 400, Rejected), ("InvalidParameterValue", 400, Rejected),
        ("RequestLimitExceeded", 503, Throttled), ("ThrottlingException", 400, Throttled), ("Odd", 429, Throttled),
        ("InsufficientInstanceCapacity", 500, NoCapacity), ("SpotMaxPriceTooLow", 400, NoCapacity),
        ("InvalidInstanceID.NotFound", 400, Gone), ("InternalError", 500, OutcomeUnknown),
        ("Unavailable", 503, OutcomeUnknown), ("RequestTimeout", 408, OutcomeUnknown), ("", 0, OutcomeUnknown),
    ],
)  # fmt: skip
def test_every_code_is_distinguished(code: str, status: int, error: type[ProviderError]) -> None:
    told = error_for_code("run_instances in us-east-1", code, "two\nlines", status)
    assert type(told) is error
    assert "\n" not in str(told)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("SignatureDoesNotMatch", "Signature expired: 20261126T200000Z is now earlier than 20261126T200500Z"),
        ("InvalidSignatureException", "Signature not yet current: 20261126T200500Z"),
        ("RequestExpired", "Request has expired."), ("RequestTimeTooSkewed", "The difference is too large."),
        ("AuthFailure", "AWS was not able to validate the provided access credentials"),
    ],
)  # fmt: skip
def test_signature_time_errors_name_the_clock(code: str, message: str) -> None:
    error = error_for_code("get_caller_identity in us-east-1", code, message, 403)
    assert type(error) is Rejected
    assert "this computer's clock is wrong" in str(error)


def test_exceptions_before_a_request_are_refusals_and_lost_replies_are_not() -> None:
    refused = [
        boto.NoCredentialsError(), boto.ProfileNotFound(profile="x"), boto.ParamValidationError(report="x"),
        boto.UnauthorizedSSOTokenError(), boto.TokenRetrievalError(provider="sso", error_msg="expired"),
    ]  # fmt: skip
    unknown = [
        boto.ReadTimeoutError(endpoint_url="u"), boto.EndpointConnectionError(endpoint_url="u"), RuntimeError("odd"),
    ]  # fmt: skip
    assert {type(error_for_exception("x", error)) for error in refused} == {Rejected}
    assert {type(error_for_exception("x", error)) for error in unknown} == {OutcomeUnknown}
    assert "aws sso login" in str(error_for_exception("x", refused[3]))

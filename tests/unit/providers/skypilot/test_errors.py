"""Classification of failed launches."""

import pytest

from broker.domain.errors import ImageRefused, NoCapacity, OutcomeUnknown, ProviderError, Rejected, Throttled
from broker.lifecycle.account_refusals import account_refusal
from providers.skypilot.api_client import Failure
from providers.skypilot.errors import error_for_failure, one_line
from providers.skypilot.plugin.shared import NOTHING_REQUESTED
from tests.support.build import offer

NONE_LEFT = "QueryError: There are no longer any instances available with the requested specifications."
SOLD_OUT = "RuntimeError: Failed to launch instances.; ClientError: An error occurred (InsufficientInstanceCapacity)"
QUOTA = "ClientError: An error occurred (VcpuLimitExceeded) when calling RunInstances: more vCPU than your limit of 0"


@pytest.mark.parametrize(
    ("kind", "message", "expected", "says"),
    [
        ("ResourcesUnavailableError", NONE_LEFT, NoCapacity, "no longer any instances available"),
        ("ResourcesUnavailableError", SOLD_OUT, NoCapacity, "InsufficientInstanceCapacity"),
        ("ResourcesUnavailableError", "HTTPError: 410 Client Error: Gone for url: x/asks/7/", NoCapacity, "410"),
        ("ResourcesUnavailableError", "HTTPError: 400 Client Error: Bad Request for url: x/asks/7/", NoCapacity, "400"),
        (
            "ResourcesUnavailableError",
            "RuntimeError: gpubroker: gb-x-head is EXITED before it was ready",
            NoCapacity,
            "",
        ),
        ("ResourcesUnavailableError", QUOTA, Rejected, "raise the account's quota"),
        ("ResourcesUnavailableError", "Found no quota for g6e.xlarge", Rejected, "raise the account's quota"),
        ("ResourcesUnavailableError", "ClientError: ExpiredToken: it is expired", Rejected, "log in again"),
        ("ResourcesUnavailableError", "QueryError: Unauthorized", Rejected, "gpubroker doctor"),
        ("ResourcesUnavailableError", "HTTPError: 401 Client Error", Rejected, "gpubroker doctor"),
        ("ResourcesUnavailableError", "TimeoutError: pod 7x4013k does not answer", OutcomeUnknown, "7x4013k"),
        ("ResourcesUnavailableError", "RuntimeError: pull access denied for x", ImageRefused, "check trainer.image"),
        ("ResourcesUnavailableError", "toomanyrequests: rate limit", Rejected, "check trainer.image"),
        ("CommandError", "pull access denied for x", OutcomeUnknown, ""),
        ("ResourcesUnavailableError", "ConnectionError: reset by peer", OutcomeUnknown, "reset by peer"),
        ("ResourcesUnavailableError", "Failed to provision all possible resources: image_id=x", OutcomeUnknown, ""),
        ("ResourcesMismatchError", "the cluster exists with other resources", Rejected, ""),
        ("RuntimeError", f"{NOTHING_REQUESTED}AuthenticationError: Unauthorized request", Rejected, "gpubroker doctor"),
        ("RuntimeError", f"{NOTHING_REQUESTED}ResourcesMismatchError: other resources", Rejected, ""),
        (
            "RuntimeError",
            f"{NOTHING_REQUESTED}ValueError: Invalid zone 'x' for region 'y'",
            Rejected,
            "ask for another region or machine",
        ),
        ("RuntimeError", f"{NOTHING_REQUESTED}ConnectionError: no route to host", Throttled, "no route to host"),
        ("RuntimeError", f"{NOTHING_REQUESTED}QueryError: out of stock", NoCapacity, "out of stock"),
        ("AuthenticationError", "Unauthorized request", OutcomeUnknown, ""),
        ("CommandError", "setup failed with return code 1", OutcomeUnknown, ""),
        ("BrokenProcessPool", "a worker died", OutcomeUnknown, ""),
        ("RequestCancelled", "", OutcomeUnknown, "RequestCancelled"),
        ("CANCELLED", "request 1 ended without a result", OutcomeUnknown, ""),
    ],
)
def test_only_launches_that_created_nothing_are_refusals(
    kind: str, message: str, expected: type[ProviderError], says: str
) -> None:
    found = error_for_failure(Failure(kind=kind, message=message), "aws", [])
    assert type(found) is expected
    assert str(found).startswith("aws: ")
    assert says in str(found)
    assert NOTHING_REQUESTED not in str(found)


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ("An error occurred (PendingVerification) when calling RunInstances: being validated", "registration"),
        ("An error occurred (Blocked) when calling RunInstances: not recognized as a valid account", "registration"),
        ("An error occurred (OptInRequired) when calling RunInstances: You are not subscribed", "registration"),
        ("RuntimeError: global/account-inactive: Your account is inactive.", "registration"),
        ("Account suspended", "registration"),
        ("This account is currently blocked", "registration"),
        ("There are not enough funds in your account to rent this pod", "pay in"),
        ("Your balance is too low to rent a GPU", "pay in"),
        ("Your account lacks credit; see the billing page.", "pay in"),
        ("insufficient_credit", "pay in"),
        ("Please add a payment method", "pay in"),
        ("(RequestExpired) when calling RunInstances: Request has expired.", "clock is wrong"),
        ("(SignatureDoesNotMatch): Signature not yet current: 20261126T200500Z", "clock is wrong"),
        ("(ExpiredToken): The security token included in the request is expired", "have expired"),
    ],
)
def test_errors_that_a_user_must_fix_are_refusals_with_the_fix(said: str, fix: str) -> None:
    for failure in (
        Failure(kind="ResourcesUnavailableError", message=said),
        Failure(kind="RuntimeError", message=f"{NOTHING_REQUESTED}ValueError: {said}"),
    ):
        found = error_for_failure(failure, "cloud", [])
        assert type(found) is Rejected
        assert fix in str(found).rpartition("; ")[2]
    assert type(error_for_failure(Failure(kind="RuntimeError", message=said), "cloud", [])) is OutcomeUnknown


def test_a_message_is_one_short_line_without_secrets() -> None:
    said = one_line("\x1b[33mfirst\n second\t key=s3cret \x1b[0m" + "x" * 1000 + " the cause", ["s3cret", ""])
    assert said.startswith("first second key=***")
    assert said.endswith("the cause")
    assert len(said) <= 600
    assert "\x1b" not in said


@pytest.mark.parametrize(
    "message",
    [
        "ClientError: An error occurred (RequestLimitExceeded) when calling the RunInstances operation (reached max "
        "retries: 4): Request limit exceeded.",
        "ClientError: An error occurred (ThrottlingException): Rate exceeded",
        "HTTPError: 429 Client Error: Too Many Requests for url: https://console.vast.ai/api/v0/asks/123/",
        "HTTPError: 429 Client Error for url: x/asks/1/: API requests too frequent endpoint threshold=4.5",
        "LambdaCloudError: global/rate-limited Too many launch requests; rate limit exceeded",
        "QueryError: Rate limit exceeded",
    ],
)
def test_refusal_for_the_rate_of_calls_is_no_quota(message: str) -> None:
    error = error_for_failure(Failure(kind="ResourcesUnavailableError", message=message), "aws", [])
    assert type(error) is Throttled
    assert account_refusal(offer(), str(error)) is None
    before = error_for_failure(Failure(kind="RuntimeError", message=NOTHING_REQUESTED + message), "aws", [])
    assert type(before) is Throttled


@pytest.mark.parametrize(
    "answer",
    [
        '404 Client Error for url: x/asks/7/: {"error": "invalid_args", "msg": "error 404/3603: no_such_ask Instance"}',
        '410 Client Error for url: x/asks/7/: {"error": "no_such_ask", "msg": "no longer available"}',
        '400 Client Error for url: x/asks/7/: {"error": "invalid_price", "msg": "search again"}',
    ],
)
def test_errors_of_an_offer_that_is_gone_are_no_capacity(answer: str) -> None:
    failure = Failure(kind="ResourcesUnavailableError", message=f"HTTPError: {answer}")
    assert type(error_for_failure(failure, "vast", [])) is NoCapacity


def test_a_throttled_create_of_vast_left_no_machine_under_any_error() -> None:
    message = "429 Client Error: Too Many Requests for url: https://console.vast.ai/api/v0/asks/123/: too frequent"
    assert type(error_for_failure(Failure(kind="HTTPError", message=message), "vast", [])) is Throttled
    listing = message.replace("/v0/asks/123/", "/v1/instances/")
    assert type(error_for_failure(Failure(kind="HTTPError", message=listing), "vast", [])) is OutcomeUnknown


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        ("HTTPError: 400 Client Error for url: x/asks/7/: invalid_args image or template_hash_id is needed", "correct"),
        ("HTTPError: 402 Client Error: Payment Required for url: x/asks/7/", "pay in"),
        ("QueryError: Spend limit exceeded: your hourly spend is over $80", "pay in"),
        ("QueryError: Your balance is too low. Please add credits", "pay in"),
        ("QueryError: Insufficient funds to rent this pod", "pay in"),
    ],
)
def test_errors_that_another_machine_would_not_mend(message: str, fix: str) -> None:
    error = error_for_failure(Failure(kind="ResourcesUnavailableError", message=message), "vast", [])
    assert type(error) is Rejected
    assert fix in str(error)
    refusal = account_refusal(offer(), str(error))
    assert (refusal is not None) == (fix == "pay in")

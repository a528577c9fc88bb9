"""Translation of SkyPilot's exception classes and texts into the broker's errors.

A failure before any create is a definite refusal, and so is a failure after which SkyPilot removed the machine.
Any other failure may have left a machine behind and becomes OutcomeUnknown.
"""

import re
from collections.abc import Iterable

from broker.domain.errors import ImageRefused, NoCapacity, OutcomeUnknown, ProviderError, Rejected, Throttled
from providers.aws.api import CLOCK
from providers.common.machine_task import IMAGE_FIX, image_refused
from providers.skypilot.api_client import Failure
from providers.skypilot.plugin.shared import NOTHING_REQUESTED

_CAPACITY = re.compile(
    r"insufficient.?capacity|InsufficientInstanceCapacity|InsufficientHostCapacity|UnfulfillableCapacity|"
    r"not enough capacity|no longer any instances available|no instances? (currently )?available|out of stock|"
    r"does not have the resources|SpotMaxPriceTooLow|bid_too_low|invalid_price|the bid is below|"
    r"MaxSpotInstanceCountExceeded|"
    r"capacity-not-available|no_such_ask|4(00|04|10) Client Error[^;]*/asks/|requested GPU type is not available|"
    r"could not find an offer|"
    r"is \w+ before it was ready",
    re.I,
)
PAY_IN = "pay in at the cloud"
_SPENDING = re.compile(
    r"insufficient.*(credit|balance|funds)|(not enough|lacks?|no) (credits?|balance|funds)\b|negative balance|"
    r"(credit|balance) (is )?(too low|zero|exhausted)|payment method|payment required|\b402 Client Error|"
    r"spend(ing)?[ -]limit|hourly spend",
    re.I,
)
"""Refusals for the account's money: a balance that is used up, or a spend limit of the account."""
_FIXES = (
    (
        r"PendingVerification|OptInRequired|SubscriptionRequired|\(Blocked\)|"
        r"account[ -](is |was |has been |currently )*(inactive|suspended|banned|blocked|disabled)",
        "finish the account's registration in the cloud's console, or ask its support",
    ),
    (_SPENDING.pattern, PAY_IN),
    (r"found no quota|\w*(?<!Request)LimitExceeded\b|quota|\blimit exceeded", "raise the account's quota"),
    (
        r"signature (expired|not yet current)|RequestExpired|RequestTimeTooSkewed",
        f"log in again, or {CLOCK}",
    ),
    (r"expired", "log in again: the credentials have expired"),
    (
        r"unauthorized|invalid.?api.?key|AuthFailure|InvalidClientTokenId|UnauthorizedOperation|\b40[13]\b|forbidden|"
        r"invalid cloud credentials|NoCloudAccess|no cloud is enabled|not enabled|credentials",
        "check the key with `gpubroker doctor`",
    ),
    (r"image .*(not found|unknown|denied)|toomanyrequests|failed to pull", IMAGE_FIX),
    (r"invalid region|invalid zone|instance type .*not found|not supported", "ask for another region or machine"),
)
_THROTTLED = re.compile(
    r"RequestLimitExceeded|request limit exceeded|Throttling(Exception)?\b|\bthrottled\b|RequestThrottled|SlowDown|"
    r"rate[ -]?limit(ed|s)?( exceeded)?\b|TooManyRequests|too many requests|requests too frequent|"
    r"\b429 Client Error|\bHTTP 429\b|status(?: code)?[ :=]*429\b",
    re.I,
)
"""Refusals for the rate of calls: neither a quota nor a missing capacity. Docker Hub's pull limit is another matter."""
_PULL_LIMIT = re.compile(r"toomanyrequests:|pull rate limit", re.I)
_INVALID = re.compile(r"invalid_args|invalid[-_ ]parameters|InvalidParameter|ParamValidation|MissingParameter", re.I)
"""Refusals of the request itself, e.g. of an image or its login: another machine would be refused too."""
_OFFER_GONE = re.compile(r"no_such_ask|invalid_price|bid_too_low", re.I)
"""Refusals of one offer. Vast gives them the code `invalid_args` too (create_instance.yaml: 404 `no_such_ask`)."""
_UNBOUGHT = re.compile(r"429 Client Error[^;]*/asks/", re.I)
"""A refused create of Vast, which creates one machine per call: nothing exists."""
THROTTLE_RETRY_S = 15.0
"""Seconds until the next launch after a refusal for the rate of calls; Vast's penalty is 12 s."""
_UNAVAILABLE = re.compile(
    r"Connection ?(Error|Reset|Refused|Aborted)|Timeout|timed out|temporar|unreachable|\b50[0234]\b", re.I
)
"""Pattern of messages about a short outage of the cloud or of the network."""
UNAVAILABLE_RETRY_S = 10.0
"""Seconds until the next launch after a short outage of the cloud or of the network."""
_REFUSAL_KINDS = {
    "NoCloudAccessError", "InvalidCloudCredentials", "InvalidCloudConfigs", "CloudUserIdentityError",
    "ClusterOwnerIdentityMismatchError", "ResourcesMismatchError", "NotSupportedError", "InvalidClusterNameError",
    "InvalidSkyPilotConfigError", "ProvisionPrechecksError", "PermissionDeniedError", "UserRequestRejectedByPolicy",
}  # fmt: skip
"""Exception classes that SkyPilot raises before it sends a request to any cloud."""
_ANSI = re.compile(r"\x1b\[[0-9;]*[a-zA-Z]")


def error_for_failure(failure: Failure, cloud: str, secrets: Iterable[str]) -> ProviderError:
    """Return the broker's error for a failed launch on `cloud`, in one line without the `secrets`."""
    before_request = failure.message.startswith(NOTHING_REQUESTED)
    message = one_line(failure.message.removeprefix(NOTHING_REQUESTED), secrets)
    kind = message.partition(":")[0] if before_request else failure.kind
    text = f"{cloud}: {message}" if message else f"{cloud}: {kind}"
    is_definite = before_request or failure.kind == "ResourcesUnavailableError"
    if is_definite and image_refused(message):
        return ImageRefused(f"{text}; {IMAGE_FIX}")
    if (is_definite and _THROTTLED.search(message) and not _PULL_LIMIT.search(message)) or _UNBOUGHT.search(message):
        return Throttled(text, after_s=THROTTLE_RETRY_S)
    fix = next((fix for pattern, fix in _FIXES if re.search(pattern, message, re.I)), None)
    refusal = Rejected(f"{text}; {fix}" if fix else text)
    if kind in _REFUSAL_KINDS:
        return refusal
    if is_definite and _INVALID.search(message) and not _OFFER_GONE.search(message):
        return Rejected(f"{text}; correct the job's image, login or options")
    if is_definite and _SPENDING.search(message):
        return Rejected(f"{text}; {PAY_IN}")
    if is_definite and _CAPACITY.search(message):
        return NoCapacity(text)
    if before_request and fix is None and _UNAVAILABLE.search(message):
        return Throttled(text, after_s=UNAVAILABLE_RETRY_S)
    if before_request or (fix is not None and is_definite):
        return refusal
    return OutcomeUnknown(text)


def one_line(text: str, secrets: Iterable[str]) -> str:
    """Return `text` without colours, line breaks and secrets, cut to about 600 characters.

    More is kept of the end than of the beginning, because the end names the causes.
    """
    plain = " ".join(_ANSI.sub("", text).split())
    for secret in secrets:
        if secret:
            plain = plain.replace(secret, "***")
    return plain if len(plain) <= 600 else f"{plain[:200]} … {plain[-395:]}"

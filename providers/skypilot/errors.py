"""What a failed launch means: SkyPilot's exception class and its text, in the broker's words.

Only what is known to be said before anything was created, or after SkyPilot has taken it away again, is a definite
refusal. All else may have left a machine behind: OutcomeUnknown.
"""

import re
from collections.abc import Iterable

from broker.domain.errors import ImageRefused, NoCapacity, OutcomeUnknown, ProviderError, Rejected, Throttled
from providers.aws.api import CLOCK
from providers.common.image_errors import IMAGE_FIX, image_refused
from providers.skypilot.api_client import Failure
from providers.skypilot.shared import NOTHING

_CAPACITY = re.compile(
    r"insufficient.?capacity|InsufficientInstanceCapacity|InsufficientHostCapacity|UnfulfillableCapacity|"
    r"not enough capacity|no longer any instances available|no instances? (currently )?available|out of stock|"
    r"does not have the resources|SpotMaxPriceTooLow|bid_too_low|the bid is below|MaxSpotInstanceCountExceeded|"
    r"capacity-not-available|no_such_ask|4(00|04|10) Client Error[^;]*/asks/|could not find an offer|"
    r"is \w+ before it was ready",
    re.I,
)
_FIXES = (
    (
        r"PendingVerification|OptInRequired|SubscriptionRequired|\(Blocked\)|"
        r"account[ -](is |was |has been |currently )*(inactive|suspended|banned|blocked|disabled)",
        "finish the account's registration in the cloud's console, or ask its support",
    ),
    (
        r"insufficient.*(credit|balance|funds)|(not enough|lacks?|no) (credits?|balance|funds)\b|negative balance|"
        r"(credit|balance) (is )?too low|payment method",
        "pay in at the cloud",
    ),
    (r"found no quota|VcpuLimitExceeded|InstanceLimitExceeded|quota|limit exceeded", "raise the account's quota"),
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
    (r"invalid region|invalid zone|instance type .*not found|not supported", "ask for another place or machine"),
)
_AWAY = re.compile(
    r"Connection ?(Error|Reset|Refused|Aborted)|Timeout|timed out|temporar|unreachable|\b50[0234]\b", re.I
)
"""The cloud, or the way to it, was away for a moment."""
AWAY_S = 10.0
_REFUSES = {
    "NoCloudAccessError", "InvalidCloudCredentials", "InvalidCloudConfigs", "CloudUserIdentityError",
    "ClusterOwnerIdentityMismatchError", "ResourcesMismatchError", "NotSupportedError", "InvalidClusterNameError",
    "InvalidSkyPilotConfigError", "ProvisionPrechecksError", "PermissionDeniedError", "UserRequestRejectedByPolicy",
}  # fmt: skip
"""Raised before SkyPilot asks a cloud for anything."""
_ANSI = re.compile(r"\x1b\[[0-9;]*[a-zA-Z]")


def meaning(failure: Failure, cloud: str, secrets: Iterable[str]) -> ProviderError:
    """The broker's error for a failed launch on `cloud`, in one line without the `secrets`."""
    nothing = failure.message.startswith(NOTHING)
    said = one_line(failure.message.removeprefix(NOTHING), secrets)
    kind = said.partition(":")[0] if nothing else failure.kind
    text = f"{cloud}: {said}" if said else f"{cloud}: {kind}"
    definite = nothing or failure.kind == "ResourcesUnavailableError"
    if definite and image_refused(said):
        return ImageRefused(f"{text}; {IMAGE_FIX}")
    fix = next((fix for pattern, fix in _FIXES if re.search(pattern, said, re.I)), None)
    refusal = Rejected(f"{text}; {fix}" if fix else text)
    if kind in _REFUSES:
        return refusal
    if definite and _CAPACITY.search(said):
        return NoCapacity(text)
    if nothing and fix is None and _AWAY.search(said):
        return Throttled(text, after_s=AWAY_S)
    if nothing or (fix is not None and definite):
        return refusal
    return OutcomeUnknown(text)


def one_line(text: str, secrets: Iterable[str]) -> str:
    """Without colours, line breaks and secrets, and not longer than people read; the causes are at the end."""
    plain = " ".join(_ANSI.sub("", text).split())
    for secret in secrets:
        if secret:
            plain = plain.replace(secret, "***")
    return plain if len(plain) <= 600 else f"{plain[:200]} … {plain[-395:]}"

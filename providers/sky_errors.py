"""What a failed launch means: SkyPilot's exception class and its text, in the broker's words.

Only what is known to be said before anything was created, or after SkyPilot has taken it away again, is a definite
refusal. All else may have left a machine behind: OutcomeUnknown.
"""

import re
from collections.abc import Iterable

from broker.domain.errors import NoCapacity, OutcomeUnknown, ProviderError, Rejected
from providers.sky_api import Failure

_CAPACITY = re.compile(
    r"insufficient.?capacity|InsufficientInstanceCapacity|InsufficientHostCapacity|UnfulfillableCapacity|"
    r"not enough capacity|no longer any instances available|no instances? (currently )?available|out of stock|"
    r"does not have the resources|SpotMaxPriceTooLow|bid_too_low|the bid is below|MaxSpotInstanceCountExceeded|"
    r"capacity-not-available|no_such_ask|4(04|10) Client Error[^;]*/asks/|could not find an offer|"
    r"is \w+ before it was ready",
    re.I,
)
_FIXES = (
    (r"found no quota|VcpuLimitExceeded|InstanceLimitExceeded|quota|limit exceeded", "raise the account's quota"),
    (r"expired", "log in again: the credentials have expired"),
    (
        r"unauthorized|invalid.?api.?key|AuthFailure|InvalidClientTokenId|UnauthorizedOperation|401|403|forbidden|"
        r"invalid cloud credentials|NoCloudAccess|no cloud is enabled|not enabled|credentials",
        "check the key with `gpubroker doctor`",
    ),
    (r"insufficient.*(credit|balance|funds)|negative balance", "pay in at the cloud"),
    (
        r"manifest unknown|image .*(not found|unknown|denied)|pull access denied|toomanyrequests|failed to pull",
        "check trainer.image and its login",
    ),
    (r"invalid region|invalid zone|instance type .*not found|not supported", "the cloud sells no such thing any more"),
)
_REFUSES = {
    "NoCloudAccessError", "InvalidCloudCredentials", "InvalidCloudConfigs", "CloudUserIdentityError",
    "ClusterOwnerIdentityMismatchError", "ResourcesMismatchError", "NotSupportedError", "InvalidClusterNameError",
    "InvalidSkyPilotConfigError", "ProvisionPrechecksError", "PermissionDeniedError", "UserRequestRejectedByPolicy",
}  # fmt: skip
"""Raised before SkyPilot asks a cloud for anything."""
_ANSI = re.compile(r"\x1b\[[0-9;]*[a-zA-Z]")


def meaning(failure: Failure, cloud: str, secrets: Iterable[str]) -> ProviderError:
    """The broker's error for a failed launch on `cloud`, in one line without the `secrets`."""
    said = one_line(failure.message, secrets)
    text = f"{cloud}: {said}" if said else f"{cloud}: {failure.kind}"
    if failure.kind in _REFUSES:
        return Rejected(_with_fix(text))
    if failure.kind == "ResourcesUnavailableError":
        if _CAPACITY.search(said):
            return NoCapacity(text)
        return Rejected(_with_fix(text)) if _fix(said) else OutcomeUnknown(text)
    if failure.kind in ("ValueError", "AssertionError") and re.search(
        r"invalid (region|zone)|not found in", said, re.I
    ):
        return Rejected(_with_fix(text))
    return OutcomeUnknown(f"{text} ({failure.kind})")


def one_line(text: str, secrets: Iterable[str]) -> str:
    """Without colours, line breaks and secrets, and not longer than people read; the causes are at the end."""
    plain = " ".join(_ANSI.sub("", text).split())
    for secret in secrets:
        if secret:
            plain = plain.replace(secret, "***")
    return plain if len(plain) <= 600 else f"{plain[:200]} … {plain[-395:]}"


def _fix(text: str) -> str | None:
    return next((fix for pattern, fix in _FIXES if re.search(pattern, text, re.I)), None)


def _with_fix(text: str) -> str:
    fix = _fix(text)
    return f"{text}; {fix}" if fix else text

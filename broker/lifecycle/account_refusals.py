"""What a cloud's refusal of a create is about: this offer, or the account, of which every offer of that cloud depends.

The words are those of clouds, SkyPilot and our own providers. What is not recognised is of the offer alone. Nothing of
the message itself is shown to others: it is about the launch of some team.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from broker.billing.accrual import refused
from broker.domain.job import Attempt, Reason
from broker.domain.offer import ACCOUNT, Offer

BLOCK_S = 600.0
"""How long an account is left alone after its first refusal; twice as long after each that follows."""
MOST_S = 3600.0
"""People mend an account and wait for no longer than this."""

_QUOTA = re.compile(r"\bquotas?\b|VcpuLimitExceeded|InstanceLimitExceeded|MaxSpotInstanceCountExceeded", re.I)
_CREDIT = re.compile(
    r"insufficient[ _-](account )?(credit|balance|funds)|negative balance|out of credit|pay in at the cloud|"
    r"payment required|add (more )?(credit|funds)",
    re.I,
)
_KEY = re.compile(
    r"refuses the key|no API key|AuthFailure|InvalidClientTokenId|SignatureDoesNotMatch|UnrecognizedClientException|"
    r"InvalidAccessKeyId|MissingAuthenticationToken|IncompleteSignature|ExpiredToken|RequestExpired|"
    r"TokenRefreshRequired|UnauthorizedOperation|AccessDenied|NotAuthorized|OptInRequired|PendingVerification|"
    r"SubscriptionRequired|invalid.?api.?key|unauthori[sz]ed|\bforbidden\b|NoCloudAccess|InvalidCloudCredentials|"
    r"CloudUserIdentityError|no cloud is enabled|check the key with|log in again|the token in the configuration|"
    r"AWS_ACCESS_KEY_ID",
    re.I,
)


@dataclass(frozen=True, kw_only=True)
class AccountRefusal:
    """`key`: what is not to be bought for a while, as `Store.block_offer` takes it. `words`: why, and the fix."""

    key: str
    words: str


def account_keys(offer: Offer) -> tuple[str, str, str]:
    """Of blocks that cover an offer: of all its provider sells, of its cloud, of machines like it in its region.

    Quotas are for a kind of machine and a region: another kind may still be had there.
    """
    provider = provider_key(offer.provider)
    cloud = f"{provider}{offer.cloud}/"
    return provider, cloud, f"{cloud}{offer.region}/{offer.accelerator}/{'spot' if offer.spot else 'on-demand'}"


def provider_key(name: str) -> str:
    return f"{ACCOUNT}{name}/"


def of_account(offer: Offer, message: str) -> AccountRefusal | None:
    """What a refusal says of the account; None: it is about this offer or request alone."""
    _, cloud, kind = account_keys(offer)
    if _CREDIT.search(message):
        return AccountRefusal(key=cloud, words=f"{offer.cloud} refuses: insufficient balance; add credit at the cloud")
    if _QUOTA.search(message):
        what = f"{'spot' if offer.spot else 'on-demand'} {offer.accelerator} in {offer.region}"
        words = f"{offer.cloud} refuses: the account's quota for {what} is used up; raise it at the cloud"
        return AccountRefusal(key=kind, words=words)
    if _KEY.search(message):
        words = f"{offer.cloud} refuses the key, or what it may do; check it with `gpubroker doctor`"
        return AccountRefusal(key=cloud, words=words)
    return None


def account_refused(attempt: Attempt) -> bool:
    """Its create was refused by its account, and nothing stands: it costs neither money nor a retry. Its detail then
    begins with the words for that; what was refused before any cloud was asked never does.
    """
    if attempt.reason is not Reason.REJECTED or not refused(attempt):
        return False
    found = of_account(attempt.line.offer, attempt.detail)
    return found is not None and attempt.detail.startswith(found.words)


def refused_in_a_row(earlier: Sequence[Attempt]) -> Sequence[Attempt]:
    """Refused attempts of a job, oldest first, after the last one that came up: what that pulled and bought is proof
    that what was refused before it had passed. `earlier`: in order.
    """
    up = max((place for place, one in enumerate(earlier, 1) if one.first_beat_at is not None), default=0)
    return [one for one in earlier[up:] if refused(one) or one.reason is Reason.IMAGE]


def block_s(refusal: AccountRefusal, earlier: Sequence[Attempt]) -> float:
    """Twice as long each time that the same was refused to this job: nobody has mended it yet."""
    same = sum(_key(one) == refusal.key for one in refused_in_a_row(earlier) if account_refused(one))
    return float(min(MOST_S, BLOCK_S * 2 ** min(same, 16)))


def _key(attempt: Attempt) -> str | None:
    found = of_account(attempt.line.offer, attempt.detail)
    return None if found is None else found.key


def told_refusals(blocks: Mapping[str, str], asked: Sequence[str]) -> Iterator[str]:
    """The accounts that refuse, of the providers that a job may use (`asked`; empty: of all), each once."""
    said = {why for key, why in blocks.items() if key.startswith(ACCOUNT) and _may_use(key, asked)}
    return iter(sorted(said))


def _may_use(key: str, asked: Sequence[str]) -> bool:
    return not asked or any(key.startswith(provider_key(name)) for name in asked)

"""Classifies a cloud's refusal of a create: it concerns one offer, or the account behind all offers of the cloud.

The patterns match messages of clouds, SkyPilot and our providers. An unrecognised message concerns the offer only. The
message itself is not shown to other teams, because it is about one team's launch.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from broker.billing.accrual import refused
from broker.domain.job import Attempt, Reason
from broker.domain.offer import ACCOUNT, Offer

BLOCK_S = 600.0
"""Seconds for which an account is not used after its first refusal; doubled after each further refusal."""
MAX_BLOCK_S = 3600.0
"""Longest block: a user who has repaired an account waits no longer than this."""

MAX_OFFER_BLOCK_S = 600.0
"""Longest block of one offer: spot that comes back is used after this time at most."""

_QUOTA = re.compile(r"\bquotas?\b|VcpuLimitExceeded|InstanceLimitExceeded|MaxSpotInstanceCountExceeded", re.I)
_CREDIT = re.compile(
    r"insufficient[ _-](account )?(credit|balance|funds)|negative balance|out of credit|pay in at the cloud|"
    r"payment required|add (more )?(credit|funds)|spend(ing)?[ -]limit|hourly spend|balance (is )?(too low|zero)",
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
    """A refusal that concerns an account.

    `key`: the key that is blocked, for `Store.block_offer`. `message`: the reason and the fix.
    """

    key: str
    message: str


def account_keys(offer: Offer) -> tuple[str, str, str]:
    """Return the block keys that cover an offer: its provider, its cloud, and similar machines in its region.

    Quotas apply to one kind of machine in one region; another kind may still be available there.
    """
    provider = provider_key(offer.provider)
    cloud = f"{provider}{offer.cloud}/"
    return provider, cloud, f"{cloud}{offer.region}/{offer.accelerator}/{'spot' if offer.spot else 'on-demand'}"


def provider_key(name: str) -> str:
    return f"{ACCOUNT}{name}/"


def account_refusal(offer: Offer, message: str) -> AccountRefusal | None:
    """Return the account refusal that a message describes; None: it concerns this offer or request only."""
    _, cloud, kind = account_keys(offer)
    if _CREDIT.search(message):
        return AccountRefusal(
            key=cloud, message=f"{offer.cloud} refuses: insufficient balance; add credit at the cloud"
        )
    if _QUOTA.search(message):
        machines = f"{'spot' if offer.spot else 'on-demand'} {offer.accelerator} in {offer.region}"
        message = f"{offer.cloud} refuses: the account's quota for {machines} is used up; raise it at the cloud"
        return AccountRefusal(key=kind, message=message)
    if _KEY.search(message):
        message = f"{offer.cloud} refuses the key, or what it may do; check it with `gpubroker doctor`"
        return AccountRefusal(key=cloud, message=message)
    return None


def refused_by_account(attempt: Attempt) -> bool:
    """Return True if the account refused the create and no machine exists. Such an attempt costs no money and no retry.

    Its detail begins with the text of the account's refusal. A refusal before any cloud was asked has another text.
    """
    if attempt.reason is not Reason.REJECTED or not refused(attempt):
        return False
    refusal = account_refusal(attempt.line.offer, attempt.detail)
    return refusal is not None and attempt.detail.startswith(refusal.message)


def refused_in_a_row(earlier: Sequence[Attempt]) -> Sequence[Attempt]:
    """Return the refused attempts of a job since its latest attempt that booted, oldest first.

    A boot proves that earlier refusals no longer apply. `earlier`: in the order of their numbers.
    """
    up = max((place for place, attempt in enumerate(earlier, 1) if attempt.first_beat_at is not None), default=0)
    return [attempt for attempt in earlier[up:] if refused(attempt) or attempt.reason is Reason.IMAGE]


def block_s(refusal: AccountRefusal, earlier: Sequence[Attempt]) -> float:
    """Return the block time in seconds, doubled for each repetition of the same refusal to this job."""
    same = sum(_key(attempt) == refusal.key for attempt in refused_in_a_row(earlier) if refused_by_account(attempt))
    return float(min(MAX_BLOCK_S, BLOCK_S * 2 ** min(same, 16)))


def offer_block_s(offer_id: str, earlier: Sequence[Attempt], base_s: float) -> float:
    """Return the block time in seconds of a refused offer, doubled for each of its refusals to this job in a row.

    A job that waits for spot asks again and again; each time costs nothing, but leaves an attempt.
    """
    same = sum(attempt.line.offer.id == offer_id for attempt in refused_in_a_row(earlier))
    return float(min(MAX_OFFER_BLOCK_S, base_s * 2 ** min(same, 16)))


def _key(attempt: Attempt) -> str | None:
    refusal = account_refusal(attempt.line.offer, attempt.detail)
    return None if refusal is None else refusal.key


def refusing_accounts(blocks: Mapping[str, str], providers: Sequence[str]) -> Iterator[str]:
    """Return the reasons, each once, why accounts of `providers` (empty: all) refuse."""
    reasons = {why for key, why in blocks.items() if key.startswith(ACCOUNT) and _may_use(key, providers)}
    return iter(sorted(reasons))


def _may_use(key: str, providers: Sequence[str]) -> bool:
    return not providers or any(key.startswith(provider_key(name)) for name in providers)

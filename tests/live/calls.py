"""Every call that `--read-only` may make, per cloud: the guard lets no other call out, and `--explain` prints them."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReadCall:
    """One call that only reads. `verb`, `target`: method and path, or service and operation for AWS."""

    verb: str
    target: str
    purpose: str
    expected: str
    """Answer that a person with a valid key should see."""


def _call(verb: str, target: str, purpose: str, expected: str) -> ReadCall:
    return ReadCall(verb=verb, target=target, purpose=purpose, expected=expected)


HOSTS = {
    "runpod": "https://api.runpod.io", "vast": "https://console.vast.ai", "lambda": "https://cloud.lambda.ai",
    "aws": "https://<service>.<region>.amazonaws.com",
}  # fmt: skip
CALLS: Mapping[str, tuple[ReadCall, ...]] = {
    "runpod": (
        _call("GET", "/v2/pods", "check, listing", "the account's pods; an empty list without any"),
        _call("GET", "/v2/catalog/datacenters", "places", "about 30 data centres"),
        _call("GET", "/v2/catalog/gpus", "prices and stock, by tier and count", "GPU types with a price and centres"),
        _call("GET", "/v2/billing/pods", "charges, for invoices", "one record per pod and day"),
        _call("POST", "/graphql", "queries only: bids, balance, account, types", "bids, balance; 410 once retired"),
    ),
    "vast": (
        _call("GET", "/api/v0/users/current/", "check, account", "the credit and the user's id"),
        _call("POST", "/api/v0/bundles/", "searches, at most 10 a minute", "asks; 64 at most for some accounts"),
        _call("GET", "/api/v1/instances/", "listing, 25 a page, 1 s apart", "the account's instances"),
    ),
    "lambda": (
        _call("GET", "/api/v1/instances", "check, listing", "the account's machines"),
        _call("GET", "/api/v1/instance-types", "prices and capacity", "about 20 types, few with capacity"),
        _call("GET", "/api/v1/ssh-keys", "account", "the account's SSH keys"),
    ),
    "aws": (
        _call("sts", "GetCallerIdentity", "check, account", "the account's number"),
        _call("ec2", "DescribeInstances", "check (dry run), listing", "machines with our tag"),
        _call("ec2", "DescribeInstanceTypes", "machine types", "the G and P families"),
        _call("ec2", "DescribeInstanceTypeOfferings", "zones of each type", "zones by type"),
        _call("ec2", "DescribeAvailabilityZones", "ids of zones", "zones of each region"),
        _call("ec2", "DescribeSpotPriceHistory", "spot prices", "one price per type and zone"),
        _call("ec2", "GetSpotPlacementScores", "spot capacity", "scores of 1 to 10; limited per day"),
        _call("pricing", "GetProducts", "prices of machines, disk and traffic", "one product per region"),
        _call("service-quotas", "ListServiceQuotas", "quotas", "vCPUs by family; 0 for new accounts"),
    ),
}


def explain(clouds: list[str]) -> str:
    """Return one table of all calls, for people. No call is made and no key is read."""
    rows = [("cloud", "call", "purpose", "with a key you should see")]
    rows += [
        (cloud, f"{call.verb} {call.target}", call.purpose, call.expected) for cloud in clouds for call in CALLS[cloud]
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=False)) + f"  {row[3]}" for row in rows
    ]
    return "\n".join([*lines, "", *(f"{cloud}: {HOSTS[cloud]}" for cloud in clouds)])

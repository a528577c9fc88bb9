"""IAM's evaluation of a session policy, as far as ours goes; what it does not know fails the test."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

ALLOWED_KEYS = {"Effect", "Action", "Resource", "Condition"}


def allows(policy: Mapping[str, Any], action: str, resource: str, context: Mapping[str, str]) -> bool:
    """Return True if a statement allows `action` on `resource`; all other calls are denied."""
    assert policy["Version"] == "2012-10-17"
    return any(_matches(statement, action, resource, context) for statement in policy["Statement"])


def _matches(statement: Mapping[str, Any], action: str, resource: str, context: Mapping[str, str]) -> bool:
    assert statement["Effect"] == "Allow"
    assert set(statement) <= ALLOWED_KEYS
    return (
        _any(statement["Action"], action)
        and _any(statement["Resource"], resource)
        and _conditions(statement.get("Condition", {}), context)
    )


def _conditions(conditions: Mapping[str, Any], context: Mapping[str, str]) -> bool:
    """Return True if all conditions are met; a condition on a key that the request lacks is not met."""
    assert set(conditions) <= {"StringLike"}
    like: Mapping[str, Sequence[str]] = conditions.get("StringLike", {})
    return all(key in context and _any(patterns, context[key]) for key, patterns in like.items())


def _any(patterns: Sequence[str], value: str) -> bool:
    assert not isinstance(patterns, str)
    return any(re.fullmatch(_regex(pattern), value, re.DOTALL) for pattern in patterns)


def _regex(pattern: str) -> str:
    return "".join({"*": ".*", "?": "."}.get(c, re.escape(c)) for c in pattern)

"""Validation of policies, and the jobs that a policy covers."""

import pytest
from pydantic import ValidationError

from broker.domain.policy import Policy


@pytest.mark.parametrize(
    ("rules", "complaint"),
    [
        ({}, "has no rule"),
        ({"max_gpus": -1}, "greater than or equal to 0"),
        ({"max_gpus": 1, "timezone": "Europe/Berln"}, "did you mean Europe/Berlin?"),
        ({"max_gpus": 1, "timezone": "../etc/passwd"}, "no IANA timezone"),
        ({"max_gpus": 1, "timezone": "America"}, "no IANA timezone"),
        ({"budgets": [{"limit_usd": "NaN", "per": "day"}]}, "finite number"),
        ({"budgets": [{"limit_usd": "-1", "per": "day"}]}, "greater than 0"),
        ({"budgets": [{"limit_usd": "1", "per": "year"}]}, "'day', 'week' or 'month'"),
        ({"budgets": [{"limit_usd": "1", "per": "day"}, {"limit_usd": "2", "per": "day"}]}, "two calendar"),
        ({"budgets": [{"limit_usd": "1", "per": "day", "thresholds": [{"at": "1.1", "action": "drain"}]}]}, "less"),
        ({"budgets": [{"limit_usd": "1", "per": "day", "thresholds": [{"at": "0.5", "action": "drain"}] * 2}]}, "twi"),
        ({"approval_above_usd": "nan"}, "finite number"),
        ({"max_gpu": 1}, "Extra inputs are not permitted"),
    ],
)  # fmt: skip
def test_a_bad_policy_is_refused_with_the_reason(rules: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint.replace("?", r"\?")):
        Policy.model_validate({"name": "p", **rules})


@pytest.mark.parametrize(
    ("scope", "shown", "covered"),
    [
        ({}, "installation", {("nlp", "ann"), ("nlp", "bob"), ("web", "ann")}),
        ({"team": "nlp"}, "team nlp", {("nlp", "ann"), ("nlp", "bob")}),
        ({"user": "ann"}, "user ann", {("nlp", "ann"), ("web", "ann")}),
        ({"team": "nlp", "user": "ann"}, "user ann of team nlp", {("nlp", "ann")}),
    ],
)
def test_whom_a_policy_covers(scope: dict[str, str], shown: str, covered: set[tuple[str, str]]) -> None:
    policy = Policy.model_validate({"name": "p", "max_jobs": 1, **scope})
    everybody = {("nlp", "ann"), ("nlp", "bob"), ("web", "ann")}
    assert policy.scope == shown
    assert {who for who in everybody if policy.covers(*who)} == covered

"""AWS's account is asked of the credentials that lie there, and a session that has others is dropped."""

from pathlib import Path
from typing import Any

import pytest

from broker.domain.ids import Installation
from providers.aws import AwsCloud, AwsConfig
from tests.unit.providers.clocks import SteppedClock


async def test_a_session_lasts_as_long_as_its_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / ".aws/credentials"
    keys.parent.mkdir()
    keys.write_text("[default]\naws_access_key_id = one\n")
    cloud = AwsCloud(AwsConfig(), installation=Installation("aaaa"), clock=SteppedClock(), env={}, home=tmp_path)
    done: list[str] = []

    async def call(service: str, region: str, operation: str, **_: Any) -> dict[str, str]:
        done.append(operation)
        return {"Account": "123456789012"}

    monkeypatch.setattr(cloud._aws, "call", call)
    monkeypatch.setattr(cloud._aws, "forget_credentials", lambda: done.append("forget"))
    before = cloud.credential()
    for _ in range(2):
        assert await cloud.account() == ("123456789012",)
    keys.write_text("[default]\naws_access_key_id = two\n")
    assert cloud.credential() != before
    await cloud.account()
    assert done == ["forget", "get_caller_identity", "get_caller_identity", "forget", "get_caller_identity"]
    await cloud.close()

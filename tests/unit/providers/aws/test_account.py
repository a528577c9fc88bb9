"""AWS's account is read with the stored credentials, and with each key that they yield."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.domain.errors import Gone, OutcomeUnknown, Rejected
from broker.domain.ids import AttemptId, Installation, instance_name
from broker.domain.instance import Observed
from broker.domain.job import Handle
from providers.aws.provider import AwsCloud, AwsConfig
from providers.common.account_guard import Account
from tests.unit.providers.clocks import SteppedClock

NO_ROLE = {"AWS_EC2_METADATA_DISABLED": "true"}
HANDLE = Handle(
    provider="aws", id="i-1", name=instance_name(Installation("aaaa"), AttemptId("b" * 13)), region="us-east-1"
)


class Asked(AwsCloud):
    """Cloud whose API answers by key: `owners` has the account of each. `renewed`: the next key, in use from the next
    question on."""

    def __init__(self, home: Path) -> None:
        super().__init__(AwsConfig(), installation=Installation("aaaa"), clock=SteppedClock(), env=NO_ROLE, home=home)
        self.owners = {"one": "111", "two": "111", "other": "222"}
        self.who = home / "who"
        self.renewed: str | None = None
        self.identified = 0

    async def _answer(self, service: str, region: str, operation: str, **_: Any) -> dict[str, str]:
        self.identified += 1
        return {"Account": self.owners[await self._aws.key_id()]}

    def _moves_on(self) -> None:
        if self.renewed is not None:
            self.who.write_text(self.renewed)

    async def list(self) -> Sequence[Observed]:
        self._moves_on()
        return []

    async def destroy(self, handle: Handle) -> None:
        self._moves_on()
        raise Gone("no such machine")


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Configure credentials by a process. They expire within 15 minutes, so botocore renews them at each use."""
    made = Asked(tmp_path)
    made.who.write_text("one")
    script = tmp_path / "keys.py"
    script.write_text(
        "import datetime, json\n"
        "end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=800)\n"
        f"print(json.dumps(dict(Version=1, AccessKeyId=open({str(made.who)!r}).read(), SecretAccessKey='s',"
        " SessionToken='t', Expiration=end.isoformat())))\n"
    )
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/config").write_text(f"[default]\ncredential_process = {sys.executable} {script}\n")
    monkeypatch.setattr(made._aws, "call", made._answer)
    return made


async def test_a_session_lasts_as_long_as_its_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / ".aws/credentials"
    keys.parent.mkdir()
    keys.write_text("[default]\naws_access_key_id = one\naws_secret_access_key = s\n")
    cloud = Asked(tmp_path)
    monkeypatch.setattr(cloud._aws, "call", cloud._answer)
    before = await cloud.credential()
    for _ in range(2):
        assert await cloud.credential() == before
        assert await cloud.account() == ("111",)
    keys.write_text("[default]\naws_access_key_id = other\naws_secret_access_key = s\n")
    assert (await cloud.credential()).partition("/")[0] != before.partition("/")[0]
    assert await cloud.account() == ("222",)
    await cloud.close()


async def test_a_key_of_another_account_from_the_same_files_lists_nothing(cloud: Asked, tmp_path: Path) -> None:
    account = Account(cloud, tmp_path / "account.json")
    await account.verify()
    cloud.who.write_text("other")
    with pytest.raises(OutcomeUnknown, match="credentials belong to account 222, the jobs' machines to 111"):
        await account.verify()
    assert json.loads((tmp_path / "account.json").read_text()) == {"account": ["111"]}
    cloud.who.write_text("two")
    await account.verify()
    await cloud.close()


async def test_a_renewed_key_of_the_account_costs_one_question_and_no_listing(cloud: Asked, tmp_path: Path) -> None:
    account = Account(cloud, tmp_path / "account.json")
    await account.verify()
    digest = (await cloud.credential()).partition("/")[0]
    cloud.renewed = "two"
    for _ in range(3):
        async with account.same():
            assert await cloud.list() == []
        assert account.owns(digest), "the files are SkyPilot's to use, whichever key they give"
    assert cloud.identified == 2
    await cloud.close()


async def test_a_key_that_becomes_anothers_meanwhile_proves_no_absence(cloud: Asked, tmp_path: Path) -> None:
    account = Account(cloud, tmp_path / "account.json")
    for ask in (cloud.list, lambda: cloud.destroy(HANDLE)):
        cloud.renewed = None
        cloud.who.write_text("one")
        await account.verify()
        cloud.renewed = "other"
        with pytest.raises(OutcomeUnknown, match="account 222"):
            async with account.same():
                await ask()
    await cloud.close()


async def test_no_credentials_are_a_refusal_with_the_fix(tmp_path: Path) -> None:
    cloud = Asked(tmp_path)
    with pytest.raises(Rejected, match="aws configure"):
        await cloud.credential()
    await cloud.close()

"""Guard against listings of another account, which prove no absence; it rarely asks a cloud for its account."""

import asyncio
import stat
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from broker.domain.errors import OutcomeUnknown, ProviderError, Rejected, Throttled
from providers.common.account_guard import Account


@dataclass
class Cloud:
    """Cloud with several accounts. `owners`: mark of the account by key."""

    key: str = "a"
    owners: dict[str, Sequence[str]] = field(default_factory=lambda: {"a": ("me",), "a2": ("me",), "b": ("someone",)})
    asked: int = 0
    errors: list[ProviderError] = field(default_factory=list)
    meanwhile: Callable[[], Awaitable[None]] | None = None
    name: str = "paper"

    async def credential(self) -> str:
        return f"digest of {self.key}"

    async def account(self) -> Sequence[str]:
        self.asked += 1
        marks = self.owners[self.key]
        if self.meanwhile is not None:
            await self.meanwhile()
        if self.errors:
            raise self.errors.pop(0)
        return marks


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "paper" / "account.json"


async def test_the_cloud_is_asked_at_the_start_and_when_the_key_has_changed(file: Path) -> None:
    cloud = Cloud()
    account = Account(cloud, file)
    await asyncio.gather(*(account.verify() for _ in range(5)))
    assert cloud.asked == 1
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    cloud.key = "a2"
    await account.verify()
    await account.verify()
    assert cloud.asked == 2
    assert account.owns("digest of a2")
    assert not account.owns("digest of a")


async def test_another_account_is_refused_with_the_fix_after_a_restart_too(file: Path) -> None:
    """The error is one line with the fix, in the same process and after a restart."""
    cloud = Cloud()
    await Account(cloud, file).verify()
    cloud.key = "b"
    for account in (Account(cloud, file), Account(cloud, file)):
        with pytest.raises(OutcomeUnknown) as e:
            await account.verify()
        message = str(e.value)
        assert "\n" not in message
        assert all(
            part in message for part in ("paper", "account someone", "to me", "restore the old credentials", str(file))
        )
        assert not account.owns("digest of b")
    cloud.key = "a"
    await account.verify()
    assert account.owns("digest of a")


async def test_removing_the_file_allows_another_account(file: Path) -> None:
    cloud = Cloud()
    account = Account(cloud, file)
    await account.verify()
    cloud.key = "b"
    file.unlink()
    await account.verify()
    cloud.key = "a"
    with pytest.raises(OutcomeUnknown):
        await account.verify()


async def test_the_old_key_is_checked_again_after_another_was_refused(file: Path) -> None:
    """The cloud's session may still belong to the refused account."""
    cloud = Cloud()
    account = Account(cloud, file)
    await account.verify()
    cloud.key = "b"
    with pytest.raises(OutcomeUnknown):
        await account.verify()
    cloud.key, before = "a", cloud.asked
    await account.verify()
    assert cloud.asked == before + 1


async def test_a_key_that_changes_during_the_call_is_refused(file: Path) -> None:
    cloud = Cloud()
    account = Account(cloud, file)
    with pytest.raises(OutcomeUnknown, match="changed during the call"):
        async with account.same():
            cloud.key = "b"

    async def exchanged() -> None:
        cloud.key, cloud.meanwhile = "b", None

    cloud.key, cloud.meanwhile = "a2", exchanged
    with pytest.raises(OutcomeUnknown, match="changed during the call"):
        await account.verify()
    assert not account.owns("digest of b")


@pytest.mark.parametrize("error", [Rejected("the key is refused"), Throttled("429"), OutcomeUnknown("500")])
async def test_a_cloud_that_fails_to_answer_is_asked_again(file: Path, error: ProviderError) -> None:
    cloud = Cloud(errors=[error])
    account = Account(cloud, file)
    with pytest.raises(type(error)):
        await account.verify()
    assert not file.exists()
    await account.verify()


async def test_a_key_is_recognised_by_marks_of_the_last_answer(file: Path) -> None:
    """No answer names the account of a key, as at Lambda. The SSH key of the first launch belongs to one account."""
    cloud = Cloud(owners={"a": ("key a",), "a2": ("key a2", "ssh"), "b": ("key b", "other ssh")})
    account = Account(cloud, file)
    await account.verify()
    cloud.key = "a2"
    with pytest.raises(OutcomeUnknown, match="account key a2, the jobs' machines to key a;"):
        await account.verify()
    cloud.key, cloud.owners["a"] = "a", ("key a", "ssh")
    await account.verify()
    account.note_purchase()
    asked = cloud.asked
    assert account.owns("digest of a"), "a queued launch keeps its key"
    await account.verify()
    assert cloud.asked == asked + 1
    cloud.key = "a2"
    await account.verify()
    cloud.key = "b"
    with pytest.raises(OutcomeUnknown):
        await account.verify()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"other": 1}', '{"account": 7}'])
async def test_a_file_that_cannot_be_read_is_named(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(OutcomeUnknown, match="correct or remove it") as e:
        await Account(Cloud(), file).verify()
    assert str(file) in str(e.value)

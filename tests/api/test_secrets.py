"""Sealing of secrets against a stolen database, a rented machine and a wrong key."""

import base64
import os
from pathlib import Path

import pytest
from cryptography.fernet import Fernet, InvalidToken

from broker.domain.ids import Installation
from broker.runtime.clock import SystemClock
from broker.runtime.secret_box import MASTER_KEY_VARIABLE, SecretBox, SecretsError, master_key, sealing
from tests.support.memory_store.store import MemoryStore
from trainer.contract.documents import Sealed

BOX = SecretBox(bytes(range(32)))


def test_a_sealed_secret_opens_again_and_does_not_show_its_value() -> None:
    sealed = BOX.seal("hf_verysecret")
    assert b"verysecret" not in sealed
    assert BOX.open(sealed) == "hf_verysecret"
    assert "range" not in repr(BOX)


def test_another_master_key_says_what_to_do() -> None:
    with pytest.raises(SecretsError, match="set the secret again"):
        SecretBox(b"x" * 32).open(BOX.seal("hf_verysecret"))


def test_an_attempts_key_opens_its_own_grant_only() -> None:
    sealed = BOX.seal_for("attempt-a", Sealed(secrets={"HF_TOKEN": "hf_verysecret"}))
    opened = Sealed.model_validate_json(Fernet(BOX.attempt_key("attempt-a")).decrypt(sealed))
    assert opened.secrets == {"HF_TOKEN": "hf_verysecret"}
    for foreign in (BOX.attempt_key("attempt-b"), base64.urlsafe_b64encode(bytes(range(32)))):
        with pytest.raises(InvalidToken):
            Fernet(foreign).decrypt(sealed)
    with pytest.raises(InvalidToken):
        Fernet(BOX.attempt_key("attempt-a")).decrypt(BOX.seal("at rest"))


def test_the_key_file_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "master.key"
    key = master_key(path, {})
    assert master_key(path, {}) == key
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["master.key"]


def test_a_readable_key_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "master.key"
    master_key(path, {})
    path.chmod(0o640)
    with pytest.raises(SecretsError, match="chmod 600"):
        master_key(path, {})


def test_the_environment_wins_and_is_checked(tmp_path: Path) -> None:
    key = base64.urlsafe_b64encode(b"k" * 32).decode()
    assert master_key(tmp_path / "no", {MASTER_KEY_VARIABLE: key}) == b"k" * 32
    for wrong in ("short", "%%%", base64.urlsafe_b64encode(b"k" * 31).decode()):
        with pytest.raises(SecretsError, match=MASTER_KEY_VARIABLE):
            master_key(tmp_path / "no", {MASTER_KEY_VARIABLE: wrong})
    assert not (tmp_path / "no").exists()


@pytest.fixture
async def store() -> MemoryStore:
    store = MemoryStore(SystemClock())
    await store.installation(Installation("aaaa"))
    return store


async def test_key_is_created_for_a_new_database_and_its_mark_reveals_nothing(
    store: MemoryStore, tmp_path: Path
) -> None:
    """The key is made for a new database and its mark gives nothing away."""
    box = await sealing(store, tmp_path / "master.key", {})
    assert (await sealing(store, tmp_path / "master.key", {})).open(box.seal("hf_verysecret")) == "hf_verysecret"
    key = (tmp_path / "master.key").read_text().strip()
    assert await store.master_key(None) == box.mark
    assert box.mark not in (key, box.attempt_key("a").decode())


async def test_a_lost_key_is_not_replaced_in_silence(store: MemoryStore, tmp_path: Path) -> None:
    path = tmp_path / "master.key"
    await sealing(store, path, {})
    path.unlink()
    with pytest.raises(SecretsError, match=f"is missing: restore {path} or {MASTER_KEY_VARIABLE}, .* key adopt"):
        await sealing(store, path, {})
    assert not path.exists()


async def test_another_key_than_the_database_s_is_refused(store: MemoryStore, tmp_path: Path) -> None:
    """Two brokers with different keys could not open each other's secrets."""
    await sealing(store, tmp_path / "master.key", {})
    with pytest.raises(SecretsError, match="is not the one that sealed this database's secrets"):
        await sealing(
            store, tmp_path / "another.key", {MASTER_KEY_VARIABLE: base64.urlsafe_b64encode(b"k" * 32).decode()}
        )

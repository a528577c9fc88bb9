"""Keys in the home of SkyPilot's server: whole copies of their source, readable by their owner only."""

import stat
from pathlib import Path

import pytest

from broker.domain.ids import Installation
from providers.registry import ProvidersConfig, _account, _launcher
from providers.skypilot.config import SkyConfig
from providers.skypilot.key_copies import KeyCopies
from tests.unit.providers.clocks import SteppedClock

KEYS = {"lambda": {".lambda_cloud/lambda_keys": b"api_key = the-first-key\n"}}


def content(home: Path) -> dict[str, bytes]:
    return {str(path.relative_to(home)): path.read_bytes() for path in home.rglob("*") if path.is_file()}


def test_only_a_changed_source_is_written_again(tmp_path: Path) -> None:
    read = {"lambda": dict(KEYS["lambda"])}
    copies = KeyCopies(tmp_path, lambda: read)
    copies.refresh()
    path = tmp_path / ".lambda_cloud/lambda_keys"
    assert (content(tmp_path), stat.S_IMODE(path.stat().st_mode)) == (KEYS["lambda"], 0o600)
    path.write_bytes(b"renewed by SkyPilot itself")
    copies.refresh()
    assert path.read_bytes() == b"renewed by SkyPilot itself"
    read["lambda"] = {".lambda_cloud/lambda_keys": b"api_key = the-second-key\n"}
    with path.open("rb") as reading:
        copies.refresh()
        assert reading.read() == b"renewed by SkyPilot itself", "renamed: who reads the old one reads all of it"
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"api_key = the-second-key\n", 0o600)
    assert {"the-first-key", "the-second-key"} <= copies.secrets


def test_files_that_are_gone_at_the_source_go_as_well(tmp_path: Path) -> None:
    """SkyPilot would otherwise use old keys before a new login."""
    read = {"aws": {".aws/credentials": b"old", ".aws/sso/cache/a.json": b"{}"}, **KEYS}
    copies = KeyCopies(tmp_path, lambda: read)
    copies.refresh()
    read["aws"] = {".aws/config": b"[default]\n", ".aws/sso/cache/b.json": b"{}"}
    KeyCopies(tmp_path, lambda: read).refresh()
    assert content(tmp_path) == {**read["aws"], **KEYS["lambda"]}


def test_a_cloud_that_is_left_out_keeps_its_files(tmp_path: Path) -> None:
    read = {"aws": {".aws/credentials": b"old"}, **KEYS}
    copies = KeyCopies(tmp_path, lambda: read)
    copies.refresh()
    del read["aws"]
    copies.refresh()
    assert ".aws/credentials" in content(tmp_path)


@pytest.mark.parametrize("asked", [False, True])
async def test_skypilot_gets_only_keys_of_the_verified_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """The key must be known to belong to the account whose machines are listed."""
    monkeypatch.setenv("VAST_API_KEY", "the-first-key")
    rented = ProvidersConfig.model_validate({"vast": {}}).rented()
    ours = Installation("aaaa")
    cloud, account = _account("vast", rented["vast"], ours, tmp_path, SteppedClock())
    launcher = _launcher(SkyConfig(), rented, {"vast": (cloud, account)}, ours, tmp_path / "sky")
    assert launcher._keys is not None
    if asked:
        monkeypatch.setattr(cloud, "account", answer)
        await account.verify()
    launcher._keys.refresh()
    home = tmp_path / "sky/home"
    assert content(home) == ({".config/vastai/vast_api_key": b"the-first-key"} if asked else {})
    monkeypatch.setenv("VAST_API_KEY", "the-second-key")
    launcher._keys.refresh()
    assert content(home) == ({".config/vastai/vast_api_key": b"the-first-key"} if asked else {})
    await launcher.close()
    await cloud.close()


async def answer() -> tuple[str, ...]:
    return ("me",)

"""Whose machines a home answers for."""

from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.domain.ids import Installation
from broker.homes import OtherInstallation, installation_of
from broker.store.memory import MemoryStore

OURS, THEIRS = Installation("aaaa"), Installation("bbbb")


async def of(installation: Installation) -> MemoryStore:
    store = MemoryStore(SystemClock())
    await store.installation(installation)
    return store


async def test_another_installation_s_database_is_refused_and_the_home_keeps_its_own(tmp_path: Path) -> None:
    """The machines of the home's would be listed by nobody."""
    (tmp_path / "installation").write_text("aaaa\n")
    with pytest.raises(OtherInstallation, match=r"of installation bbbb and the home .* of aaaa; correct database_url"):
        await installation_of(await of(THEIRS), tmp_path)
    assert (tmp_path / "installation").read_text() == "aaaa\n"


async def test_a_new_home_takes_the_database_s(tmp_path: Path) -> None:
    assert await installation_of(await of(THEIRS), tmp_path) == THEIRS
    assert (tmp_path / "installation").read_text() == "bbbb\n"


async def test_a_new_database_takes_the_home_s(tmp_path: Path) -> None:
    (tmp_path / "installation").write_text("aaaa\n")
    store = MemoryStore(SystemClock())
    assert await installation_of(store, tmp_path) == OURS
    assert await store.installation(THEIRS) == OURS

"""An attempt's end is told, also where the store is away just then."""

import asyncio
from pathlib import Path

import pytest

from trainer.agent.beat import Beater
from trainer.agent.environment import Environment
from trainer.agent.last_word import LastWord
from trainer.agent.logs import LogBuffer, Redactor
from trainer.agent.ship import Shipper
from trainer.agent.state import AttemptState
from trainer.blobs import Objects, StoreError
from trainer.contract import keys
from trainer.contract.rendezvous import Beat, Final, Outcome
from trainer.ipc import RunFolder


class Away(Objects):
    """A store that takes no beat for some tries."""

    tries = 0

    async def write(self, key: str, data: bytes) -> None:
        if key.startswith(keys.BEATS) and self.tries:
            self.tries -= 1
            raise StoreError("away")
        await super().write(key, data)


@pytest.mark.parametrize("tries", [0, 3])
async def test_the_last_beat_says_so_though_the_store_is_away_for_a_moment(
    tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda _: at_once(0))
    env = Environment(blobs="", installation="inst", attempt="a", workdir=tmp_path)
    state, objects = AttemptState(env=env, run=RunFolder(root=tmp_path)), Away.open(f"file://{tmp_path}", {}, "inst")
    objects.tries = tries
    shipper = Shipper(objects, LogBuffer(Redactor({})), env, state)
    word = LastWord(objects, env, state, beater=Beater(objects, state), shipper=shipper)
    assert await word.speak(Outcome.COMPLETED, "", 0, pulled=False) is Outcome.COMPLETED
    beat, final = await objects.read(keys.beat("a", 0)), await objects.read(keys.final("a"))
    assert beat is not None
    assert final is not None
    assert Beat.model_validate_json(beat).phase == "done"
    assert Final.model_validate_json(final).outcome is Outcome.COMPLETED

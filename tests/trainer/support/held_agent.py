"""Agent whose checkpoint steps a test can hold: `python -m tests.trainer.support.held_agent`.

A step waits halfway while the folder HELD_BY has a file with the step's name. The agent assumes that a save takes
longer than any notice.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.__main__ import main
from trainer.agent.upload.save_cost import SaveCost
from trainer.agent.upload.script_snapshots import ScriptTree
from trainer.core.errors import leave
from trainer.objectstore.objects import Objects

FOLDER = "HELD_BY"
UPLOAD, SNAPSHOT = "upload", "snapshot"
BEGUN = "begun"
"""File with the keys of all uploads."""
WAITS = "-waits"
"""Suffix of the file that reports that a step is held."""
SAVE_S = 1e6
_upload, _snapshot = Objects.upload, ScriptTree.snapshot


async def held(step: str) -> None:
    while Path(os.environ[FOLDER], step).exists():
        Path(os.environ[FOLDER], step + WAITS).touch()
        await asyncio.sleep(0.01)


def note(key: str) -> None:
    with Path(os.environ[FOLDER], BEGUN).open("a") as begun:
        print(key, file=begun)


async def upload(self: Objects, key: str, path: Path, sent: Callable[[int], None] = lambda count: None) -> None:
    note(key)
    half = path.stat().st_size / 2
    sent(half)  # type: ignore[arg-type]
    await held(UPLOAD)
    await _upload(self, key, path, lambda count: sent(count - half))  # type: ignore[arg-type]


async def snapshot(self: ScriptTree, **how: Any) -> bool:
    await held(SNAPSHOT)
    return await _snapshot(self, **how)


if __name__ == "__main__":
    Objects.upload = upload  # type: ignore[method-assign]
    ScriptTree.snapshot = snapshot  # type: ignore[method-assign]
    SaveCost.save_s = lambda self, sending: SAVE_S  # type: ignore[method-assign]
    leave(main())

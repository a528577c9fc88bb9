"""The agent counts the bytes that it sends to and receives from the blob store, because clouds bill them."""

import sys

from tests.trainer.agent.test_agent import SAVER
from tests.trainer.support.harness import Bench
from trainer.contract.documents import Outcome
from trainer.contract.script import ScriptConfig


def test_everything_that_the_store_holds_of_an_attempt_was_counted(bench: Bench) -> None:
    config = ScriptConfig(code="upload:x", command=(sys.executable, "main.py", "--once"))
    agent = bench.start(script=config, code=bench.code(main=SAVER))
    final = agent.wait()
    assert final.outcome is Outcome.COMPLETED
    assert final.checkpoint is not None
    checkpoints = [p for p in bench.root.rglob("*") if p.is_file() and "/checkpoints/" in str(p)]
    stored = sum(p.stat().st_size for p in checkpoints if p.name != "manifest.json")
    assert 0 < stored == final.checkpoint.bytes
    assert final.sent_bytes > stored
    assert final.received_bytes > 0
    assert agent.beat is not None
    assert agent.beat.sent_bytes >= final.sent_bytes
    assert final.boot == agent.beat.boot

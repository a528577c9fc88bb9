"""`--read-only --explain` lists every call that is made, without keys and without a call."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.clouds.emulator import Clouds
from tests.live.calls import CALLS
from tests.live.guard import AWS_READS, GRAPHQL, READS
from tests.live.look import look

ENV = dict.fromkeys(("RUNPOD_API_KEY", "VAST_API_KEY", "LAMBDA_API_KEY"), "test-key")


def test_explain_needs_no_key_and_names_every_call() -> None:
    command = [sys.executable, "-m", "tests.live", "--read-only", "--explain"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, env={"PATH": "", "HOME": "/nowhere"}, cwd=root, capture_output=True, text=True, check=True
    )
    for cloud, calls in CALLS.items():
        for call in calls:
            assert any(
                line.startswith(cloud) and f"{call.verb} {call.target}" in line for line in done.stdout.splitlines()
            )


def test_guard_allows_what_explain_lists_and_nothing_else() -> None:
    listed = {(call.verb, call.target) for calls in CALLS.values() for call in calls}
    assert listed == READS | AWS_READS | {GRAPHQL}


@pytest.mark.parametrize("cloud", ["runpod", "vast", "lambda"])
async def test_calls_that_are_made_are_listed(tmp_path: Path, cloud: str) -> None:
    async with Clouds() as clouds:
        findings = await look(cloud, clouds.url, ENV, tmp_path)
        assert findings.error == ""
        assert clouds.world.calls
        assert clouds.violations == []

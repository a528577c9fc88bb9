"""Messages of a machine reach the user, even after hours of repeated messages of the same kind."""

import json
from pathlib import Path

import pytest

from broker.reporting.progress import MAX_MESSAGES
from trainer.agent.base.environment import Environment
from trainer.agent.base.state import AgentState
from trainer.core.ipc import RunFolder

HOURS = 24
MINUTES = [0, 1, 3, 7, 15, 31, 63, 127, 255, 511, 1023]
"""Minutes at which a message of a kind that repeats all the time is reported."""


@pytest.fixture
def state(tmp_path: Path) -> AgentState:
    env = Environment(blobs=(tmp_path / "store").as_uri(), installation="inst", attempt="a", workdir=tmp_path)
    run = RunFolder(root=tmp_path / "run")
    run.make()
    return AgentState(env=env, run=run, clock=lambda: 0.0)


def test_uploads_that_wait_for_a_day_are_reported_after_pauses_that_double(state: AgentState) -> None:
    heard = []
    for second in range(0, HOURS * 3600, 5):
        state.clock = lambda second=second: float(second)  # type: ignore[misc]
        state.add_message(
            "upload_waits", f"cannot upload checkpoints/job/a/0000000005-{second:08x}/files/model.safetensors"
        )
        heard += (
            [second // 60] if state.messages()[-1].message.endswith(f"{second:08x}/files/model.safetensors") else []
        )
    assert heard == MINUTES
    state.add_message("rolled_back", "going back to step 7")
    assert state.messages()[-1].seq == len(MINUTES) + 1 <= MAX_MESSAGES


def test_a_message_that_a_worker_repeats_is_reported_once(state: AgentState) -> None:
    lines = [*[["save_failed", "the results could not be written: 28"]] * 500, ["not_published", "the Hub refused it"]]
    state.run.messages_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(message.seq, message.kind) for message in state.messages()] == [(1, "save_failed"), (2, "not_published")]


def test_the_first_messages_of_a_kind_are_all_reported(state: AgentState) -> None:
    for step in range(9):
        state.add_message("skipped", f"step {step}: the loss is not a finite number")
    assert [message.message[:6] for message in state.messages()] == [f"step {step}" for step in range(5)]

"""The end of a program decides the outcome of its attempt."""

import signal
from typing import Any

import pytest

from trainer.agent.base.state import Ending
from trainer.agent.conclusion import AttemptEnd, ProgramEnd, ProgramResult, attempt_end, program_result
from trainer.contract.documents import ExitCode, Outcome
from trainer.core.ipc import Ended

OOM = Ended(code=ExitCode.OOM, message="GPU memory is too small", ran_out="device")
PULLED = Ended(code=ExitCode.INFRASTRUCTURE, message="another process of this job has gone", failed_by_peer=True)
BAD_HOST = Ended(code=ExitCode.INFRASTRUCTURE, message="the GPU computes wrongly", bad_host=True)
KILLED = 128 + signal.SIGKILL


def result_of(code: int, *, script: bool = False, **facts: Any) -> ProgramResult:
    defaults: dict[str, Any] = {
        "asked": False, "stopped": False, "killed_for_memory": False, "report": None, "last_line": "",
    }  # fmt: skip
    return program_result(ProgramEnd(code=code, script=script, **defaults | facts))


@pytest.mark.parametrize(
    ("code", "facts", "outcome", "message"),
    [
        (0, {}, Outcome.COMPLETED, "exit code 0"),
        (1, {"report": OOM}, Outcome.OOM, "GPU memory is too small"),
        (1, {"last_line": "boom"}, Outcome.INFRASTRUCTURE, "the worker ended with exit code 1; its last line: boom"),
        (1, {"script": True}, Outcome.USER_ERROR, "the program ended with exit code 1"),
        (-11, {}, Outcome.INFRASTRUCTURE, "the worker ended with signal SIGSEGV"),
        (-40, {}, Outcome.INFRASTRUCTURE, "the worker ended with signal 40"),
        (-9, {"killed_for_memory": True}, Outcome.OOM, "the kernel killed it for memory"),
        (1, {"report": Ended(code=ExitCode.BACK)}, Outcome.DRAINED, ""),
        (1, {"script": True, "asked": True}, Outcome.DRAINED, ""),
        (-9, {"stopped": True}, Outcome.DRAINED, ""),
    ],
)
def test_program_end_has_one_outcome(code: int, facts: dict[str, Any], outcome: Outcome, message: str) -> None:
    result = result_of(code, **facts)
    assert result.outcome is outcome
    assert message in result.message


def test_memory_that_ran_out_is_reported() -> None:
    assert result_of(1, report=OOM).ran_out == "device"
    assert result_of(KILLED, killed_for_memory=True).ran_out == "host"
    assert result_of(ExitCode.OOM, script=True).ran_out is None


def test_kill_on_this_machine_outranks_a_lost_peer() -> None:
    assert result_of(1, report=PULLED).failed_by_peer
    killed = result_of(KILLED, report=PULLED, killed_for_memory=True)
    assert (killed.outcome, killed.failed_by_peer, killed.ran_out) == (Outcome.OOM, False, "host")


def test_killed_worker_blames_no_host() -> None:
    assert result_of(1, report=BAD_HOST).bad_host
    assert not result_of(-9, report=BAD_HOST, stopped=True).bad_host


ENDING = Ending(outcome=Outcome.DEADMAN, reason="the lease did not change", save=True, asked_at=0.0)


@pytest.mark.parametrize(
    ("code", "uploaded", "ending", "expected"),
    [
        (0, True, None, (Outcome.COMPLETED, "")),
        (0, True, ENDING, (Outcome.COMPLETED, "")),
        (0, False, ENDING, (Outcome.DEADMAN, "the lease did not change, before the results were in the blob store")),
        (0, False, None, (Outcome.INFRASTRUCTURE, "the results could not be written to the blob store in time")),
        (70, True, ENDING, (Outcome.DEADMAN, "the lease did not change")),
        (70, False, ENDING, (Outcome.DEADMAN, "the lease did not change")),
        (70, True, None, (Outcome.DRAINED, "another machine of this job must end, so all machines end")),
        (65, True, ENDING, (Outcome.DATA, "the worker ended with exit code 65")),
        (65, False, None, (Outcome.DATA, "the worker ended with exit code 65")),
    ],
)
def test_attempt_end_by_upload_and_request(
    code: int, uploaded: bool, ending: Ending | None, expected: tuple[Outcome, str]
) -> None:
    assert attempt_end(result_of(code), uploaded=uploaded, ending=ending) == AttemptEnd(*expected, code)

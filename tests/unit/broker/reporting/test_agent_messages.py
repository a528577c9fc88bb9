"""Each message of a machine is reported once, from any of its documents."""

from typing import Any

from broker.reporting.progress import MAX_MESSAGES, new_agent_messages
from tests.support import build
from trainer.contract.documents import AgentMessage, Final, Heartbeat, Outcome


def beat(*seqs: int, boot: str = "b") -> Heartbeat:
    return Heartbeat(attempt="a", boot=boot, seq=1, messages=tuple(told(seq) for seq in seqs))


def told(seq: int) -> AgentMessage:
    return AgentMessage(seq=seq, kind="skipped", message=f"number {seq}")


def heard(before: dict[str, Any], after: dict[str, Any]) -> list[int]:
    return [message.seq for message in new_agent_messages(build.attempt(**before), build.attempt(**after))]


def test_each_message_is_recorded_once_in_order() -> None:
    final = Final(attempt="a", outcome=Outcome.COMPLETED, boot="b", messages=(told(2), told(3)))
    assert heard({}, {"beat": beat(1, 2)}) == [1, 2]
    assert heard({"beat": beat(1, 2)}, {"beat": beat(1, 2)}) == []
    assert heard({"beat": beat(1, 2)}, {"beat": beat(1, 2), "final": final}) == [3]
    assert heard({"beat": beat(1, 2)}, {"beat": beat(2, 3), "final": final}) == [3]


def test_messages_of_a_new_agent_start_count_from_one_and_are_limited() -> None:
    assert heard({"beat": beat(1, 2)}, {"beat": beat(1, boot="c")}) == [1]
    assert heard({}, {"beat": beat(MAX_MESSAGES, MAX_MESSAGES + 1)}) == [MAX_MESSAGES]

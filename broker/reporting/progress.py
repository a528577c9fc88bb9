"""Progress of a job's attempts (steps reached and repeated), and new messages of their agents."""

from collections.abc import Sequence
from typing import Protocol

from broker.domain.job import Attempt
from trainer.contract.documents import AgentMessage, Final, Heartbeat


class AttemptProgress(Protocol):
    """An attempt, as a row or as a view."""

    @property
    def beat(self) -> Heartbeat | None: ...
    @property
    def final(self) -> Final | None: ...


def steps(run: AttemptProgress) -> tuple[int | None, int | None]:
    """Return the (first, last) optimizer step; None: the attempt never trained."""
    documents = [document for document in (run.beat, run.final) if document is not None]
    if not documents:
        return None, None
    resumed = next((document.resumed_from for document in documents if document.resumed_from is not None), 0)
    return resumed, max(resumed, *(document.step for document in documents))


def steps_redone(runs: Sequence[AttemptProgress]) -> int:
    """Return the repeated steps of all resumes: the furthest step so far minus the step resumed from."""
    furthest = redone = 0
    for run in runs:
        start, end = steps(run)
        if start is None or end is None:
            continue
        redone += max(0, min(furthest, end) - start)
        furthest = max(furthest, end)
    return redone


MAX_MESSAGES = 100
"""Maximum number of messages of one start of an agent; later ones are dropped."""


def new_agent_messages(before: Attempt, after: Attempt) -> tuple[AgentMessage, ...]:
    """Return the messages of `after` that `before` lacks, the oldest first."""
    known_keys = {key for key, _ in _messages(before)}
    new_messages = {
        key: message for key, message in _messages(after) if key not in known_keys and message.seq <= MAX_MESSAGES
    }
    return tuple(new_messages[key] for key in sorted(new_messages))


def _messages(attempt: Attempt) -> list[tuple[tuple[str, int], AgentMessage]]:
    """Return messages by the agent's start and number; the final report repeats the messages of heartbeats."""
    documents = (attempt.beat, attempt.final)
    return [
        ((document.boot, message.seq), message) for document in documents if document for message in document.messages
    ]

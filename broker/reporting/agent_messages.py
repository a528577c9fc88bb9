"""What a machine has to tell people, each thing once."""

from broker.domain.job import Attempt
from trainer.contract.documents import AgentMessage

MOST = 100
"""Of one start of an agent: a machine that goes on and on is not listened to."""


def new_agent_messages(before: Attempt, after: Attempt) -> tuple[AgentMessage, ...]:
    """What `after` has that `before` had not, the first thing first."""
    known = {key for key, _ in _all(before)}
    found = {key: one for key, one in _all(after) if key not in known and one.seq <= MOST}
    return tuple(found[key] for key in sorted(found))


def _all(attempt: Attempt) -> list[tuple[tuple[str, int], AgentMessage]]:
    """By the agent's start and number; the last word repeats what the beats say."""
    documents = (attempt.beat, attempt.final)
    return [((one.boot, told.seq), told) for one in documents if one is not None for told in one.messages]

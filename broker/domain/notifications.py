"""Channels: where people and programs are told; and what is told through them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from broker.domain.job import Attempt, Event, Job
from broker.domain.tenancy import Scope

NOTICES = "notices"
"""The stream of a channel that holds what is about no job."""
LOG_CHANNEL = "log"
"""The channel that every installation has: the daemon's log."""


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Goes through the same outbox as a job's events, to the channels of its team and the installation's."""

    id: str
    """Chosen by whoever posts it: what must be told once has one id, e.g. `digest-daily-2026-03-01-nlp`."""
    kind: str
    """Dotted, e.g. `budget.threshold`."""
    message: str
    """One line for people."""
    team: str | None = None
    """None: the installation's, for its own channels only."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """JSON."""
    at: datetime | None = None
    """The database's time, once posted."""


@dataclass(frozen=True, kw_only=True)
class Channel:
    """One way to a person or a program, of a team or of the installation."""

    id: str
    kind: str
    """Which notifier serves it: `log`, `slack`, `webhook`."""
    name: str
    """For people; one of a team has it."""
    team: str | None
    """None: the installation's, which is told about every team."""
    events: tuple[str, ...] = ()
    """Kinds of events and notices that it gets, each exact or a prefix with `*` (`attempt.*`); empty: all."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """JSON that its kind defines; never a secret."""
    sealed: bytes | None = field(default=None, repr=False)
    """A JSON object of its secrets by name, sealed by the SecretBox."""
    created_at: datetime
    enabled: bool = True
    reason: str = ""
    """Why it is disabled, or what its last delivery failed of."""
    failures: int = 0
    """Failed deliveries in a row."""


@dataclass(frozen=True, kw_only=True)
class JobSnapshot:
    """A job as it is at the moment of a delivery, which may be later than the event."""

    job: Job
    attempts: tuple[Attempt, ...] = ()
    """In the order of their numbers."""


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """What is told through one channel: an event, a notice, or neither (the job merely changed: a refresh).

    At least once, and in order within a stream: repeats have the same `id`.
    """

    stream: str
    """The job's id, or NOTICES."""
    event: Event | None = None
    notice: Notice | None = None
    folded: int = 0
    """Earlier events of the same kind that this one replaces; they are told by no other delivery."""
    attempts: int = 0
    """Deliveries of it that failed before this one."""

    @property
    def id(self) -> str:
        """What receivers tell repeats apart by; empty for a refresh."""
        if self.event is not None:
            return f"evt_{self.event.job_id}_{self.event.seq}"
        return f"ntc_{self.notice.id}" if self.notice is not None else ""

    @property
    def kind(self) -> str:
        told = self.event or self.notice
        return told.kind if told is not None else ""

    @property
    def refresh(self) -> bool:
        return self.event is None and self.notice is None


@dataclass(frozen=True, kw_only=True)
class SlackUser:
    """A link: whoever is `user` in `workspace` acts as `owner` of `team`, with these scopes and no token."""

    team: str
    workspace: str
    """`T…`, as Slack names it."""
    user: str
    """`U…`, as Slack names it."""
    owner: str
    scopes: tuple[Scope, ...]
    name: str = ""
    """As Slack showed it when the link was made; for people."""
    linked_by: str = ""
    linked_at: datetime | None = None
    """The database's time."""

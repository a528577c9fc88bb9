"""Notification channels, and the events and notices delivered through them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from broker.domain.job import Attempt, Event, Job
from broker.domain.tenancy import Scope

NOTICES = "notices"
"""The stream of a channel that holds notices about no job."""
LOG_CHANNEL = "log"
"""The channel that every installation has: the daemon's log."""


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A message about no single job, delivered through the same outbox as events.

    It goes to the channels of its team and to those of the installation.
    """

    id: str
    """Id chosen by the sender, e.g. `digest-daily-2026-03-01-nlp`. A notice whose id was posted before is dropped."""
    kind: str
    """Dotted, e.g. `budget.threshold`."""
    message: str
    """One line for users."""
    team: str | None = None
    """None: the notice is the installation's and goes to its channels only."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """JSON."""
    at: datetime | None = None
    """The database's time of posting; None: not posted yet."""


@dataclass(frozen=True, kw_only=True)
class Channel:
    """One notification target of a team or of the installation."""

    id: str
    kind: str
    """Notifier of the channel: `log`, `slack`, `webhook`."""
    name: str
    """Display name, unique within a team."""
    team: str | None
    """None: the channel is the installation's and receives the notices of every team."""
    events: tuple[str, ...] = ()
    """Kinds of events and notices to deliver, each exact or a prefix with `*` (`attempt.*`); empty: all."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """JSON defined by the channel's kind; never a secret."""
    sealed: bytes | None = field(default=None, repr=False)
    """Sealed JSON object of the channel's secrets by name; None: the channel has none."""
    created_at: datetime
    enabled: bool = True
    reason: str = ""
    """Reason why the channel is disabled or its latest delivery failed; empty: neither."""
    failures: int = 0
    """Number of consecutive failed deliveries."""


@dataclass(frozen=True, kw_only=True)
class JobSnapshot:
    """A job at the moment of a delivery, which may be later than the event."""

    job: Job
    attempts: tuple[Attempt, ...] = ()
    """Attempts in the order of their numbers."""


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """One delivery through one channel: an event, a notice, or neither (a refresh of a changed job).

    Delivered at least once, and in order within a stream. Repeats have the same `id`.
    """

    stream: str
    """The job's id, or NOTICES."""
    event: Event | None = None
    notice: Notice | None = None
    folded: int = 0
    """Number of earlier events of the same kind that this delivery replaces; they are not delivered themselves."""
    attempts: int = 0
    """Number of failed attempts at this delivery so far."""

    @property
    def id(self) -> str:
        """Id by which receivers recognise repeats; empty for a refresh."""
        if self.event is not None:
            return f"evt_{self.event.job_id}_{self.event.seq}"
        return f"ntc_{self.notice.id}" if self.notice is not None else ""

    @property
    def kind(self) -> str:
        message = self.event or self.notice
        return message.kind if message is not None else ""

    @property
    def refresh(self) -> bool:
        return self.event is None and self.notice is None


@dataclass(frozen=True, kw_only=True)
class SlackUser:
    """A link of a Slack user to an owner.

    `user` of `workspace` acts as `owner` of `team`, with these scopes and without a token.
    """

    team: str
    workspace: str
    """Slack's id of the workspace (`T…`)."""
    user: str
    """Slack's id of the user (`U…`)."""
    owner: str
    scopes: tuple[Scope, ...]
    name: str = ""
    """Name that Slack showed when the link was made, for display."""
    linked_by: str = ""
    linked_at: datetime | None = None
    """The database's time; None: not stored yet."""

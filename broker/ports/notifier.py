"""The door to people."""

from collections.abc import Mapping
from typing import Any, Protocol

from broker.domain.notifications import Channel, Delivery, JobSnapshot

State = Mapping[str, Any]
"""A little JSON that the store keeps per channel and job, e.g. where a message stands that is updated in place."""
Settings = tuple[Mapping[str, Any], Mapping[str, str]]
"""A channel's configuration and its secrets by name."""


class Notifier(Protocol):
    """Serves all channels of one kind. Called for many streams at once, for one stream one delivery after the other."""

    @property
    def kind(self) -> str:
        """`Channel.kind` of the channels that it serves."""
        ...

    @property
    def refresh_s(self) -> float | None:
        """How often it is called for a job that is not at rest, event or not; None: for events only."""
        ...

    def check(self, config: Mapping[str, Any], secrets: Mapping[str, str]) -> Settings:
        """A new channel's settings as they are to be kept. Raises InvalidInput with every fault."""
        ...

    def fresh(self, secrets: Mapping[str, str]) -> tuple[Mapping[str, str], str | None]:
        """(`secrets` with those that this kind makes itself made anew, what a person is shown of them once).

        The one before stays valid beside it for a while. Unchanged and None where a kind makes none.
        """
        ...

    async def deliver(
        self, channel: Channel, delivery: Delivery, snapshot: JobSnapshot | None, state: State | None
    ) -> State | None:
        """Tells, and returns the state to keep for the stream (`state` where nothing changes).

        `snapshot`: the job; None for a notice. Raises the errors of `domain.errors.NotifyError`, whose `state` is kept
        as well; any other error counts as NotDelivered.
        """
        ...

    async def close(self) -> None: ...

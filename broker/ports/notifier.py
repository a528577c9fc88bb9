"""Protocol of notification channels."""

from collections.abc import Mapping
from typing import Any, Protocol

from broker.domain.notifications import Channel, Delivery, JobSnapshot

State = Mapping[str, Any]
"""Small JSON that the store keeps per channel and job, e.g. the id of a message that is updated in place."""
Settings = tuple[Mapping[str, Any], Mapping[str, str]]
"""A channel's configuration and its secrets by name."""


class Notifier(Protocol):
    """Serves all channels of one kind.

    Streams are served concurrently; the deliveries of one stream are sent one after the other.
    """

    @property
    def kind(self) -> str:
        """`Channel.kind` of the channels that it serves."""
        ...

    @property
    def refresh_s(self) -> float | None:
        """Seconds between calls for a job that has not ended, with or without an event; None: for events only."""
        ...

    def check(self, config: Mapping[str, Any], secrets: Mapping[str, str]) -> Settings:
        """Return a new channel's settings in their stored form. Raises InvalidInput with every fault."""
        ...

    def fresh(self, secrets: Mapping[str, str]) -> tuple[Mapping[str, str], str | None]:
        """Return `secrets` with renewed generated secrets, and the text that a user is shown once.

        The previous secret stays valid for a while. Where a kind generates none, the result is `secrets` unchanged and
        None.
        """
        ...

    async def deliver(
        self, channel: Channel, delivery: Delivery, snapshot: JobSnapshot | None, state: State | None
    ) -> State | None:
        """Deliver, and return the state to keep for the stream (`state` if it does not change).

        `snapshot`: the job; None for a notice. Raises the errors of `domain.errors.NotifyError`, whose `state` is kept
        as well. Any other error counts as NotDelivered.
        """
        ...

    async def close(self) -> None: ...

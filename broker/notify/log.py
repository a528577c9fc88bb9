"""Notification channel that writes events and notices to the daemon's log. It always exists."""

import logging
from collections.abc import Mapping
from typing import Any

from broker.domain.errors import InvalidInput, Problem
from broker.domain.notifications import Channel, Delivery, JobSnapshot
from broker.ports import Settings, State

log = logging.getLogger("gpubroker.events")


class LogNotifier:
    """`ports.Notifier` for the daemon's log. Every installation has exactly one such channel."""

    kind = "log"
    refresh_s: float | None = None

    def check(self, config: Mapping[str, Any], secrets: Mapping[str, str]) -> Settings:
        raise InvalidInput(Problem(field="kind", message="there is one log, and it is a channel already"))

    def fresh(self, secrets: Mapping[str, str]) -> tuple[Mapping[str, str], str | None]:
        return secrets, None

    async def deliver(
        self, channel: Channel, delivery: Delivery, snapshot: JobSnapshot | None, state: State | None
    ) -> State | None:
        if (event := delivery.event) is not None:
            log.info("%s #%d %s: %s", event.job_id, event.seq, event.kind, event.message)
        elif (notice := delivery.notice) is not None:
            log.info("%s %s: %s", notice.team or "installation", notice.kind, notice.message)
        return state

    async def close(self) -> None:
        """Do nothing: the notifier holds no resources."""

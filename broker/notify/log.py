"""Events as log lines: the notifier that is always there."""

import logging

from broker.domain.job import Event

log = logging.getLogger("gpubroker.events")


class LogNotifier:
    async def notify(self, event: Event) -> None:
        log.info("%s #%d %s: %s", event.job_id, event.seq, event.kind, event.message)

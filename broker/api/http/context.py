"""What handlers find in the application."""

from typing import Annotated

from aiohttp import web

from broker.api.core.auth import Authenticator
from broker.api.core.metrics import Metrics
from broker.api.core.readiness import Readiness
from broker.api.core.stream_limits import Streams
from broker.api.service.content import Content
from broker.api.service.jobs import Service
from broker.domain.ids import JobId
from trainer.contract.base import shaped

SERVICE = web.AppKey("service", Service)
CONTENT = web.AppKey("content", Content)
AUTH = web.AppKey("auth", Authenticator)
METRICS = web.AppKey("metrics", Metrics)
READINESS = web.AppKey("readiness", Readiness)
STREAMS = web.AppKey("streams", Streams)

JobRef = Annotated[JobId, shaped(r"^[a-z2-7]{13}$", "must be the whole id of a job, which `gpubroker ls` shows")]

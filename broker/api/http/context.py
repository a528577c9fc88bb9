"""Keys of the objects that `build_app` stores in the application for the handlers."""

from aiohttp import web

from broker.api.core.auth import Authenticator
from broker.api.core.metrics import Metrics
from broker.api.core.readiness import Readiness
from broker.api.core.sessions import WebSessions
from broker.api.core.stream_limits import Streams
from broker.api.imports.data_imports import DataImports
from broker.api.service.content import Content
from broker.api.service.job_feed import JobMetricsReader
from broker.api.service.jobs import Service
from broker.api.service.slack import Slack
from broker.runtime.background_tasks import UninterruptedActions

ACTIONS = web.AppKey("actions", UninterruptedActions)
SERVICE = web.AppKey("service", Service)
CONTENT = web.AppKey("content", Content)
DATA_IMPORTS = web.AppKey("data_imports", DataImports)
JOB_METRICS = web.AppKey("job_metrics", JobMetricsReader)
AUTH = web.AppKey("auth", Authenticator)
METRICS = web.AppKey("metrics", Metrics)
READINESS = web.AppKey("readiness", Readiness)
SESSIONS = web.AppKey("sessions", WebSessions)
STREAMS = web.AppKey("streams", Streams)
SLACK = web.AppKey("slack", Slack)

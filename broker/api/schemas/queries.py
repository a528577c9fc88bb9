"""Parameters of requests, with their rules: query strings and path parameters of HTTP, and fields of gRPC requests."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema

from broker.api.schemas.job_data import StoredKindView
from broker.domain.ids import JobId
from broker.domain.job import JobState
from broker.domain.market.offer_history import KEEP_DAYS
from broker.domain.spec import Accelerator, Moment, Name
from broker.domain.spending import SpendBy
from trainer.contract.base import MOMENT_EXAMPLES, Config, Text, matching, moment, moment_from

HEADERS: dict[str, dict[str, Any]] = {
    "Idempotency-Key": {"type": "string", "maxLength": 200, "pattern": "^[!-~]+$"},
    "Last-Event-ID": {"type": "string", "maxLength": 4096, "pattern": "^[!-~]*$"},
}
"""JSON Schema of each request header that a handler reads. gRPC uses the same rules for the corresponding fields."""
MAX_POINTS = 27_000
"""Maximum number of points of an answer: one series of 90 days in buckets of five minutes."""
MAX_SEQ = 2**31 - 1
"""Highest sequence number of an event."""

JobRef = Annotated[JobId, matching(r"^[a-z2-7]{13}$", "must be the whole id of a job, which `gpubroker ls` shows")]
ChannelRef = Annotated[
    str, matching(r"^([a-z2-7]{13}|log)$", "must be the id of a channel, which `gpubroker channel ls` shows")
]
TokenId = Annotated[str, matching(r"^[a-z2-7]{8}$", "must be the id of a token, which `gpubroker token ls` shows")]
AttemptNumber = Annotated[int, Field(ge=1, le=100_000)]
Label = Annotated[
    Text, matching(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?:", "must be a label, as key:value", max_length=320)
]
ArtifactPath = Annotated[Text, Field(min_length=1, max_length=512)]
"""Path of a file within a job's artifacts. 512 characters fit into a request line, even percent-encoded."""
UploadFormat = Literal["csv", "json", "jsonl", "parquet", "tar", "zip"]


def at_time(text: str, now: datetime | None) -> datetime:
    """Return a date, an ISO 8601 time with a zone, or a time such as `2h` before now. Raises ValueError.

    `now` None: durations are not times.
    """
    if now is not None:
        return moment_from(text, now, -1)
    try:
        return moment(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a time; write it as {MOMENT_EXAMPLES}") from None


def _at_time(value: Any, info: ValidationInfo) -> Any:
    """Read a text by the time of the request, which is the context's `now`."""
    return at_time(value, (info.context or {}).get("now")) if isinstance(value, str) else value


_TIMES = [
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "date"},
    {"type": "string", "pattern": "^[0-9]{1,3}[dhms]$"},
]
Instant = Annotated[Moment, BeforeValidator(_at_time), WithJsonSchema({"anyOf": _TIMES, "examples": ["7d"]})]
"""`2026-01-31T12:00:00Z`, `2026-01-31` in UTC, or a duration before now, such as `2h` or `7d`."""


# ------------------------------------------------------------------------------------------------------ jobs and offers


class QuoteQuery(Config):
    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    """Maximum number of lines in the answer; offers that fit come first."""


class OffersQuery(Config):
    provider: Name | None = None
    accelerator: Annotated[tuple[Accelerator, ...], Field(max_length=32)] = ()
    """Accelerators to list, repeated; `a100` includes all its variants. Absent: all."""
    limit: Annotated[int, Field(ge=1, le=5000)] = 500


class OfferHistoryQuery(Config):
    gpu: Annotated[tuple[Accelerator, ...], Field(min_length=1, max_length=8)]
    """Accelerators, repeated; `a100` includes all its variants."""
    cloud: Annotated[tuple[Name, ...], Field(max_length=16)] = ()
    region: Annotated[tuple[Annotated[Text, Field(max_length=100)], ...], Field(max_length=32)] = ()
    market: Literal["spot", "on-demand"] | None = None
    """Absent: both markets."""
    gpus: Annotated[int, Field(ge=1, le=64)] | None = None
    """GPUs of a machine; absent: any number."""
    days: Annotated[int, Field(ge=1, le=KEEP_DAYS)] = 7
    until: Instant | None = None
    """End of the days; absent: now."""
    points: Annotated[int, Field(ge=1, le=MAX_POINTS)] = 168
    """Maximum number of points of a series; each then covers several five-minute buckets."""
    limit: Annotated[int, Field(ge=1, le=500)] = 50
    """Maximum number of series in the answer; fewer if there would be more than 27000 points in all."""


class JobsQuery(Config):
    label: Annotated[tuple[Label, ...], Field(max_length=16)] = ()
    """`key:value`, repeated; a job must have all labels."""
    state: Annotated[tuple[JobState, ...], Field(max_length=16)] = ()
    """States to list, repeated; a job must be in one of these states."""
    team: Name | None = None
    """Team to list, for admins; all other callers see their own team."""
    owner: Name | None = None
    """User who submitted the job."""
    since: Instant | None = None
    """Earliest creation time, inclusive."""
    until: Instant | None = None
    """Latest creation time, exclusive."""
    cursor: Annotated[str, Field(max_length=200)] | None = None
    """`next` of the previous page."""
    limit: Annotated[int, Field(ge=1, le=500)] = 50


class RetryQuery(Config):
    resume: Literal["0", "1"] = "1"
    """1: continue from the old job's last checkpoint, if there is one and the job did not succeed."""


class DataQuery(Config):
    kind: Annotated[tuple[StoredKindView, ...], Field(max_length=4)] = ()
    """Kinds of data to delete, repeated; none: everything."""


class EventsQuery(Config):
    after: Annotated[int, Field(ge=0, le=MAX_SEQ)] = 0
    """Return only events with a higher seq. The header `Last-Event-ID` takes precedence."""
    follow: Literal["0", "1"] = "1"
    """0: a JSON list of at most 500 existing events; 1: a stream until the job has ended."""


class LogsQuery(Config):
    attempt: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Number of the attempt. Absent: the latest, and when following also the attempts after it."""
    follow: Literal["0", "1"] = "1"
    """0: the text up to now; 1: a stream until the job, or the chosen attempt, has ended."""
    tail: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Number of last lines to return; needs `follow=0`. Absent: all."""
    since: Instant | None = None
    """Earliest upload time of the text; needs `follow=0`. Absent: any."""
    timestamps: Literal["0", "1"] = "0"
    """1: each line begins with the time at which it was uploaded, in UTC; needs `follow=0`."""


# ------------------------------------------------------------------------------------------------------ gRPC requests


class WatchQuery(Config):
    after: Annotated[int, Field(ge=0, le=MAX_SEQ)] = 0
    follow: bool = True


class FollowQuery(Config):
    attempt: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    position: Annotated[str, Field(max_length=4096)] = ""
    follow: bool = True


class DecisionQuery(Config):
    number: AttemptNumber


class GrpcRetryQuery(Config):
    resume: bool = True


class DownloadQuery(Config):
    path: ArtifactPath
    offset: Annotated[int, Field(ge=0)] = 0


# ------------------------------------------------------------------------------------------------ files, teams, money


class UploadQuery(Config):
    name: Annotated[
        str,
        matching(r"^[^/\\\x00-\x1f\x7f]+$", "must be a file's name, without a folder", min_length=1, max_length=255),
    ]
    """File name for users; its ending determines the format."""
    format: UploadFormat | None = None
    """Format of the file. Absent: the ending of `name` determines the format. tar: a folder of code, or of pictures."""
    sha256: Annotated[str, matching(r"^[0-9a-f]{64}$", "must be 64 of 0-9 and a-f")] | None = None
    """Expected hash of the bytes; other bytes are refused. Absent: not checked."""


class PolicyTeamQuery(Config):
    team: Name | None = None
    """Team of the policy. Absent: your own team. If your team has no policy of that name, an admin gets the policy of
    all teams.
    """


class ApplyPolicyQuery(Config):
    replaces: Annotated[int, Field(ge=0, le=MAX_SEQ)] | None = None
    """Version that is replaced; 0: no policy of this name exists. With another stored version the answer is 409, and
    nothing is stored. Absent: any version.
    """


class DryRunQuery(Config):
    days: Annotated[int, Field(ge=1, le=90)] = 30
    """Days to look back."""


class SpendParameters(Config):
    by: SpendBy = "job"
    since: Instant | None = None
    """Start of the window; absent: 30 days before `until`."""
    until: Instant | None = None
    """End of the window; absent: now."""
    zone: Annotated[Text, Field(max_length=64)] = "UTC"
    """IANA name of the time zone in which days and months are counted."""
    team: Name | None = None
    user: Name | None = None


class CalibrationParameters(Config):
    since: Instant | None = None
    """Start of the window; absent: 30 days before `until`."""
    until: Instant | None = None
    """End of the window; absent: now. Jobs count by the time at which they finished."""


class ChargesParameters(Config):
    cloud: Name
    since: Instant | None = None
    until: Instant | None = None


class AuditQuery(Config):
    team: Name | None = None
    """Team to list, for admins; all other callers see their own team."""
    actor: Annotated[Text, Field(max_length=200)] | None = None
    action: (
        Annotated[
            str, matching(r"^[a-z_]+(\.[a-z_]+)?$", "must be an action, for example job.submit or job", max_length=64)
        ]
        | None
    ) = None
    """An action such as `job.submit`, or a kind such as `job` for all its actions."""
    target: Annotated[Text, Field(max_length=200)] | None = None
    since: Instant | None = None
    """Earliest time, inclusive."""
    until: Instant | None = None
    """Latest time, exclusive."""
    cursor: Annotated[str, Field(max_length=200)] | None = None
    """`next` of the previous page."""
    limit: Annotated[int, Field(ge=1, le=500)] = 50

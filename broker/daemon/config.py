"""The daemon's configuration: `$GPUBROKER_HOME/gpubroker.yaml`, overridden by `GPUBROKER_*` variables."""

import ipaddress
import os
import re
from collections.abc import Mapping
from datetime import time
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field, ValidationError, field_validator

from broker.api.core.problems import invalid_input_of
from broker.domain.blob_url import scheme_of
from broker.domain.errors import InvalidInput, Problem
from broker.paths import CONFIG_FILE, default_home
from broker.web.oidc.config import OidcConfig
from providers.registry import ProvidersConfig
from trainer.contract import yaml_document
from trainer.contract.base import Config, matching

LOOPBACK = "127.0.0.1"
VARIABLES = {
    "database_url": "GPUBROKER_DATABASE_URL",
    "blobs": "GPUBROKER_BLOBS",
    "log_level": "GPUBROKER_LOG_LEVEL",
}
"""Environment variable that overrides each key, by key."""
PINNED = re.compile(r"[a-z0-9][a-z0-9.-]*(:\d+)?(/[a-z0-9][a-z0-9._-]*)*(:[\w.-]+)?@sha256:[0-9a-f]{64}")
"""An image reference with a digest."""

DataHost = Annotated[
    str,
    matching(
        r"^((\*\.)?[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*"
        r"|https?://([A-Za-z0-9_.-]+|\[[0-9A-Fa-f]*:[0-9A-Fa-f:.]+\])(:([1-5]?[0-9]{1,4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}))?/?)$",
        "must be a host without a port, as data.example.org, or an address, as http://data.internal:8080",
    ),
]


class IntervalsConfig(Config):
    """Polling intervals of the daemon, in seconds."""

    poll_s: Annotated[float, Field(gt=0)] = 1.0
    """Seconds between two polls of an idle controller; above 0."""
    look_s: Annotated[float, Field(gt=0)] = 2.0
    """Seconds between two checks of one live attempt; above 0."""
    list_s: Annotated[float, Field(ge=0)] = 2.0
    """Seconds between two listings of one cloud; 0 lists the machines at every poll."""
    billing_s: Annotated[float, Field(gt=0)] = 15.0
    """Seconds between two charges; above 0. The drain before a cap starts earlier by this time."""
    sweep_s: Annotated[float, Field(gt=0)] = 20.0
    """Seconds between two sweeps for orphaned machines; above 0."""
    market_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds between two polls of all offers; above 0."""
    deadman_s: Annotated[float, Field(gt=0)] = 20.0
    """Seconds between two renewals of the lease by which agents see that a broker runs; above 0."""


class LimitsConfig(Config):
    """Intervals and timeouts of the agents, in seconds."""

    heartbeat_s: Annotated[float, Field(gt=0)] = 5.0
    """Seconds between two heartbeats; above 0."""
    poll_s: Annotated[float, Field(gt=0)] = 5.0
    """Seconds between two checks for orders of the broker; above 0."""
    log_s: Annotated[float, Field(gt=0)] = 5.0
    """Seconds between two uploads of new log lines; above 0."""
    deadman_s: Annotated[float, Field(ge=0)] = 900.0
    """Seconds without a renewed broker lease after which an agent saves a checkpoint and stops; 0: never."""
    outage_s: Annotated[float, Field(gt=0)] = 7200.0
    """Seconds for which training continues while the blob store is unreachable; above 0."""
    drain_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds from a drain request to the end of the training, including the last checkpoint; above 0."""


class TrainerConfig(Config):
    """Trainer code on rented machines; see docs/guide/images-and-storage.md."""

    image: str | None = None
    """Container image `registry/name@sha256:…`, as `make image` prints it; absent: the code is installed on the
    cloud's own image."""
    registry_username: str | None = None
    """User name at a private registry; absent: no login. The password is read from GPUBROKER_REGISTRY_PASSWORD only."""
    remote_code: tuple[str, ...] = ()
    """Models whose own code jobs may run (`train.trust_remote_code`): Hub ids or folders, `*` matches anything:
    `[nvidia/*, /srv/models/*]`; empty: no model. The daemon itself never runs such code."""

    @field_validator("image")
    @classmethod
    def _pinned(cls, image: str | None) -> str | None:
        if image is not None and not PINNED.fullmatch(image):
            raise ValueError("needs a digest, since tags move: registry/name@sha256:…, as `make image` prints it")
        return image


class GrantsConfig(Config):
    """Credentials of each attempt for the blob store; see docs/guide/images-and-storage.md."""

    scope: bool = True
    """true: each attempt gets credentials for its own objects only; false: every machine gets the daemon's own
    credentials, and community hosts are refused."""
    life_s: Annotated[int, Field(ge=900, le=43_200)] = 3600
    """Lifetime of the credentials in seconds, 900 to 43200; renewed after half of it. It must exceed the boot time
    of the slowest cloud."""
    role_arn: str | None = None
    """S3: ARN of the role to assume for an attempt; absent: the keys of an IAM user are federated."""
    sts_endpoint: str | None = None
    """URL of the STS of an S3 service other than AWS; absent: the STS of AWS."""


class GrpcConfig(Config):
    """The gRPC API; see docs/reference/grpc.md."""

    host: str | None = None
    """Address on which the gRPC API listens; absent: the value of `host`."""
    port: Annotated[int, Field(ge=0, le=65535)] | Literal["next"] | None = "next"
    """TCP port of the gRPC API, 0 to 65535, 0: a free port; `next`: the port after `port` (a free port if `port` is 0);
    null: no gRPC."""
    reflection: bool = False
    """true: the server lists its services to every caller, for tools such as grpcurl; false: it does not."""


class TlsConfig(Config):
    """TLS certificate of the HTTP and gRPC APIs; renewed files are read again."""

    certificate: Path
    """Path of a PEM file: the certificate, then its chain."""
    key: Path
    """Path of the private key: a PEM file without a password."""


class RateLimitConfig(Config):
    """Rate limit of each token, over HTTP and gRPC together."""

    per_s: Annotated[float, Field(gt=0)] = 200.0
    """Average calls a second; above 0."""
    burst: Annotated[int, Field(ge=1)] = 2000
    """Calls that may come at once; at least 1."""


class StreamsConfig(Config):
    """Limits of open streams over HTTP and gRPC together: followers, uploads, downloads and shells."""

    per_token: Annotated[int, Field(ge=1)] = 100
    """Open streams of one token; at least 1."""
    total: Annotated[int, Field(ge=1)] = 500
    """Open streams of all tokens; at least 1. Over HTTP each stream takes a file descriptor."""
    recheck_s: Annotated[float, Field(gt=0, le=300)] = 2.0
    """Seconds between two checks that the token of an open stream is still valid; above 0, at most 300."""


class SlackConfig(Config):
    """Address of Slack; see docs/guide/slack-and-webhooks.md."""

    api_url: Annotated[
        str, matching(r"^https?://[^/\s]+/([^\s]*/)?$", "must be an https:// address that ends in /")
    ] = "https://slack.com/api/"
    """Base URL of Slack's API, ending in `/`; GovSlack: `https://slack-gov.com/api/`. Plain HTTP on loopback only."""

    @field_validator("api_url")
    @classmethod
    def _private(cls, url: str) -> str:
        """Raise ValueError for plain HTTP to another host, which would send tokens in the clear."""
        parts = urlsplit(url)
        if parts.scheme != "https" and not is_loopback(parts.hostname or ""):
            raise ValueError("must be https, since tokens go there")
        return url


class DigestConfig(Config):
    """Report of spending, sent once a day and once a week."""

    at: time = time(9)
    """Local time of the report, `HH:MM`. It covers the day before, and on Mondays also the week before."""
    zone: Annotated[str, Field(max_length=64)] = "UTC"
    """Time zone of the report: an IANA name such as Europe/Berlin."""
    daily: bool = True
    """true: send the report of the day before, every day; false: do not send it."""
    weekly: bool = True
    """true: send the report of the week before, every Monday; false: do not send it."""

    @field_validator("at")
    @classmethod
    def _local(cls, at: time) -> time:
        if at.tzinfo is not None:
            raise ValueError("must have no offset; give the time zone as `zone`")
        return at

    @field_validator("zone")
    @classmethod
    def _require_time_zone(cls, zone: str) -> str:
        try:
            ZoneInfo(zone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError("is not an IANA time zone; give one such as Europe/Berlin") from None
        return zone


class NotifyConfig(Config):
    """Notifications; see docs/guide/slack-and-webhooks.md."""

    insecure_hosts: tuple[str, ...] = ()
    """Names of your own hosts that webhooks may reach at any address and by plain HTTP; empty: none."""
    keep_days: Annotated[float, Field(gt=0)] = 7.0
    """Days for which a delivery waits for a failing channel before it is dropped; above 0."""
    keep_deliveries: Annotated[int, Field(ge=1)] = 100_000
    """Deliveries that may wait for one channel, at least 1; beyond this number the oldest are dropped."""
    digest: DigestConfig = DigestConfig()
    """Report of spending, sent once a day and once a week."""


class SpendGuardConfig(Config):
    """Guard against price rises; see docs/guide/caps-and-budgets.md."""

    price_rise_percent: Annotated[Decimal, Field(ge=0, le=1000)] = Decimal(2)
    """Percent by which a price may rise between quote and purchase, 0 to 1000; beyond it the job is quoted again."""


Days = Annotated[float, Field(ge=0, le=36_500)] | None


class RetentionConfig(Config):
    """Days for which the data of an ended job is kept, unless its spec sets them; null: for ever."""

    artifacts_days: Days = None
    """Days for the results of finished jobs, 0 to 36500; null: for ever."""
    checkpoints_days: Days = 30.0
    """Days for all other checkpoints, from which a retry or a raised cap resumes, 0 to 36500; null: for ever."""
    logs_days: Days = 90.0
    """Days for logs and the other files of attempts, 0 to 36500; null: for ever."""
    data_days: Days = 30.0
    """Days for a job's own copy of its data set or code, which a retry needs, 0 to 36500; null: for ever."""
    uploads_days: Days = 30.0
    """Days for uploads since they were last sent, 0 to 36500; null: for ever. Jobs keep copies of their own."""


class DaemonConfig(Config):
    """All settings of `gpubroker serve`."""

    home: Path = Field(default_factory=default_home)
    """State folder, created with mode 0700; by default `$XDG_STATE_HOME/gpubroker`, or `~/.local/state/gpubroker`
    if that variable is not set."""
    host: str = LOOPBACK
    """Address on which the HTTP API listens; other than loopback only with `tls`."""
    port: Annotated[int, Field(ge=0, le=65535)] = 7070
    """TCP port of the HTTP API, 0 to 65535; 0: a free port."""
    grpc: GrpcConfig = GrpcConfig()
    """The gRPC API; see docs/reference/grpc.md."""
    tls: TlsConfig | None = None
    """TLS certificate of the HTTP and gRPC APIs; absent: they listen on loopback only."""
    database_url: str | None = None
    """URL of a PostgreSQL server, `postgresql://user@host/database`; absent: a server embedded in the home."""
    blobs: str | None = None
    """URL of the blob store: `file:///…`, `s3://bucket/prefix`, `gs://…` or `az://…`; absent: a folder in the
    home."""
    blob_options: dict[str, str] = Field(default_factory=dict, repr=False)
    """Options of the blob store by name (endpoint, region, …). Give credentials in the environment instead."""
    storage_usd_per_gib_month: Annotated[Decimal, Field(ge=0, le=1000)] | None = None
    """Price of the blob store in dollars per GiB and month, 0 to 1000; absent: the list price of its kind, see
    docs/design/money.md."""
    retention: RetentionConfig = RetentionConfig()
    """Days for which data of ended jobs is kept; see docs/guide/caps-and-budgets.md."""
    guard: SpendGuardConfig = SpendGuardConfig()
    """Guard against price rises; see docs/guide/caps-and-budgets.md."""
    grants: GrantsConfig = GrantsConfig()
    """Credentials of attempts for the blob store; see docs/guide/images-and-storage.md."""
    providers: ProvidersConfig = ProvidersConfig()
    """Clouds and their settings; see docs/design/providers.md."""
    trainer: TrainerConfig = TrainerConfig()
    """Trainer code on rented machines; see docs/guide/images-and-storage.md."""
    model_roots: tuple[Path, ...] = ()
    """Folders below which `train.model` may name a folder of this host; empty: any for a single user, none for
    several."""
    upload_max_bytes: Annotated[int, Field(ge=1)] = 512 * 1024**2
    """Largest data set or code archive in bytes; at least 1. Up to four uploads at once take space in the home."""
    data_hosts: tuple[DataHost, ...] = ()
    """Hosts from which the daemon imports data sets, in addition to the Hub's: `data.example.org`, `*.example.org`, at
    public addresses over HTTPS; with a scheme, `http://data.internal:8080`, a host of yours at any address."""
    rate_limit: RateLimitConfig = RateLimitConfig()
    """Rate limit of each token; further calls are answered with 429 and the time to wait."""
    streams: StreamsConfig = StreamsConfig()
    """Limits of open streams; further streams are answered with 429."""
    oidc: OidcConfig | None = None
    """Sign-in by an OpenID Connect provider; absent: by token only. See docs/guide/teams.md."""
    slack: SlackConfig = SlackConfig()
    """Address of Slack; channels are added with `gpubroker channel add`."""
    notify: NotifyConfig = NotifyConfig()
    """Webhooks, waiting deliveries and the report of spending; channels are added with `gpubroker channel add`."""
    intervals: IntervalsConfig = IntervalsConfig()
    """Polling intervals of the daemon."""
    limits: LimitsConfig = LimitsConfig()
    """Intervals and timeouts of every agent."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe level that is logged on stderr: `DEBUG`, `INFO`, `WARNING` or `ERROR`. Secrets are redacted."""

    @field_validator("home")
    @classmethod
    def _expanded(cls, home: Path) -> Path:
        try:
            return home.expanduser().absolute()
        except RuntimeError:
            raise ValueError(f"{home}: there is no such user; give an absolute path") from None

    @field_validator("blobs")
    @classmethod
    def _blob_store_url(cls, url: str | None) -> str | None:
        if url is not None:
            try:
                scheme_of(url)
            except InvalidInput as e:
                raise ValueError(e.problems[0].message) from None
        return url

    @property
    def grpc_host(self) -> str:
        return self.grpc.host or self.host

    @property
    def grpc_port(self) -> int | None:
        """Return the port of the gRPC API; None: no gRPC, 0: a free port."""
        if self.grpc.port != "next":
            return self.grpc.port
        return self.port + 1 if 0 < self.port < 65535 else 0

    @property
    def blobs_url(self) -> str:
        return self.blobs or (self.home / "blobs").absolute().as_uri()

    @classmethod
    def load(cls, path: Path | None = None, *, env: Mapping[str, str] = os.environ, **overrides: Any) -> Self:
        """Read the file, the environment, then the `overrides` that are not None; the last value wins.

        Without `path`, the file of the home is read if it exists. Raises InvalidInput naming the option, the variable,
        or the key and the file.
        """
        home = overrides.get("home") or default_home()
        file = path or home / CONFIG_FILE
        values: dict[str, Any] = {"home": home, **_config_document(file, required=path is not None)}
        from_environment = {key: env[name] for key, name in VARIABLES.items() if env.get(name)}
        overridden = {key: value for key, value in overrides.items() if value is not None}
        values |= from_environment | overridden
        try:
            config = cls.model_validate(values)
            problems = _plaintext(config)
        except ValidationError as e:
            problems = invalid_input_of(e, cls, values).problems
        if problems:
            named = {key: VARIABLES[key] for key in from_environment} | {key: f"--{key}" for key in overridden}
            raise InvalidInput(*(_placed(problem, named, file) for problem in problems))
        return config


def _placed(problem: Problem, named: Mapping[str, str], file: Path) -> Problem:
    """Name the option, the variable or the file that set the key of `problem`."""
    if (name := named.get(problem.field.partition(".")[0])) is not None:
        return Problem(field=name, message=problem.message)
    return Problem(field=problem.field, message=f"{problem.message} (in {file})")


def _plaintext(config: DaemonConfig) -> tuple[Problem, ...]:
    """Return the addresses that would serve tokens and specs over a network without TLS."""
    if config.tls is not None:
        return ()
    hosts = {"host": config.host} | ({} if config.grpc_port is None else {"grpc.host": config.grpc_host})
    for field, host in hosts.items():
        if not is_loopback(host):
            message = f"{host} is not a loopback address; give tls.certificate and tls.key, or use {LOOPBACK}"
            return (Problem(field=field, message=message),)
    return ()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _config_document(file: Path, *, required: bool) -> dict[str, Any]:
    try:
        text = file.read_text("utf-8-sig")
    except FileNotFoundError:
        if required:
            raise InvalidInput(Problem(field="--config", message=f"{file} does not exist")) from None
        return {}
    except UnicodeDecodeError as e:
        raise InvalidInput(Problem(field="--config", message=f"{file}: byte {e.start} is not UTF-8")) from None
    except OSError as e:
        raise InvalidInput(Problem(field="--config", message=f"{file}: {e.strerror}")) from None
    try:
        values: dict[str, Any] = yaml_document.parse(text, str(file), may_be_empty=True).data
    except yaml_document.BadYaml as e:
        raise InvalidInput(Problem(field="--config", message=str(e))) from None
    return values

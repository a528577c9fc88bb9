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

from broker.api.core.problems import of_validation
from broker.domain.blob_url import scheme_of
from broker.domain.errors import InvalidInput, Problem
from broker.paths import CONFIG_FILE, default_home
from providers.registry import ProvidersConfig
from trainer.contract import yaml_document as yamlfile
from trainer.contract.base import Config, shaped

LOOPBACK = "127.0.0.1"
VARIABLES = {
    "database_url": "GPUBROKER_DATABASE_URL",
    "blobs": "GPUBROKER_BLOBS",
    "log_level": "GPUBROKER_LOG_LEVEL",
}
"""Keys that the environment can give, and by which name."""
PINNED = re.compile(r"[a-z0-9][a-z0-9.-]*(:\d+)?(/[a-z0-9][a-z0-9._-]*)*(:[\w.-]+)?@sha256:[0-9a-f]{64}")
"""An image reference with a digest."""


class RhythmConfig(Config):
    """How often the daemon looks, in seconds; see `controllers.context.Rhythm`."""

    poll_s: Annotated[float, Field(gt=0)] = 1.0
    """Between two looks of an idle controller."""
    look_s: Annotated[float, Field(gt=0)] = 2.0
    """Between two looks at one live attempt."""
    list_s: Annotated[float, Field(ge=0)] = 2.0
    """Between two listings of one cloud."""
    billing_s: Annotated[float, Field(gt=0)] = 15.0
    """Between two charges; part of the drain line of a cap."""
    sweep_s: Annotated[float, Field(gt=0)] = 20.0
    """Between two sweeps for orphans."""
    market_s: Annotated[float, Field(gt=0)] = 30.0
    """Between two polls of all offers."""
    deadman_s: Annotated[float, Field(gt=0)] = 20.0
    """Between two touches of the broker's lease."""


class LimitsConfig(Config):
    """Rhythms and patience of the agents, in seconds; see `trainer.contract.documents.Limits`."""

    beat_s: Annotated[float, Field(gt=0)] = 5.0
    """Between two beats."""
    poll_s: Annotated[float, Field(gt=0)] = 5.0
    """Between two looks at what is desired."""
    log_s: Annotated[float, Field(gt=0)] = 5.0
    """Between two chunks of the log."""
    deadman_s: Annotated[float, Field(ge=0)] = 900.0
    """Without a fresh lease of a broker for so long: checkpoint and stop; 0 means never."""
    outage_s: Annotated[float, Field(gt=0)] = 7200.0
    """For so long it trains on while the blob store cannot be reached."""
    drain_s: Annotated[float, Field(gt=0)] = 120.0
    """From a drain request to the end, the last checkpoint included."""


class TrainerConfig(Config):
    """Where rented machines get the trainer; see docs/guide/images-and-storage.md."""

    image: str | None = None
    """`registry/name@sha256:…`, as `make image` prints it; unset: the code is installed on the cloud's own image."""
    registry_username: str | None = None
    """For a private registry; the password comes by GPUBROKER_REGISTRY_PASSWORD only."""
    remote_code: tuple[str, ...] = ()
    """Models whose own code jobs may run (`train.trust_remote_code`): Hub ids or folders, `*` stands for anything:
    `[nvidia/*, /srv/models/*]`. None by default. The daemon itself never runs it."""

    @field_validator("image")
    @classmethod
    def _pinned(cls, image: str | None) -> str | None:
        if image is not None and not PINNED.fullmatch(image):
            raise ValueError("needs a digest, since tags move: registry/name@sha256:…, as `make image` prints it")
        return image


class GrantsConfig(Config):
    """Credentials that each attempt gets for the blob store; see docs/guide/images-and-storage.md."""

    scope: bool = True
    """False: every instance gets the daemon's own, and community hosts are refused."""
    life_s: Annotated[int, Field(ge=900, le=43_200)] = 3600
    """Renewed at half of it. At least as long as the slowest cloud takes to boot."""
    role_arn: str | None = None
    """S3: the role to assume for an attempt; without one an IAM user's keys are federated."""
    sts_endpoint: str | None = None
    """Of S3 that is not AWS, but has STS; absent: AWS's own."""


class GrpcConfig(Config):
    """The gRPC door; see docs/reference/grpc.md."""

    host: str | None = None
    """Where it listens; absent: as `host`."""
    port: Annotated[int, Field(ge=0, le=65535)] | Literal["next"] | None = "next"
    """`next`: the one after `port`, and a free one where that is 0; null: no gRPC."""
    reflection: bool = False
    """Tell everybody what services there are, for grpcurl and the like."""


class TlsConfig(Config):
    """The daemon's own certificate, for both doors; renewed files are read again."""

    certificate: Path
    """PEM: the certificate, then those that signed it."""
    key: Path
    """PEM, without a password."""


class RateLimitConfig(Config):
    """How fast each token may call, over HTTP and gRPC together."""

    per_s: Annotated[float, Field(gt=0)] = 200.0
    """In the long run."""
    burst: Annotated[int, Field(ge=1)] = 2000
    """At once."""


class StreamsConfig(Config):
    """What is open at once, over HTTP and gRPC together: followers, uploads, downloads and shells."""

    per_token: Annotated[int, Field(ge=1)] = 100
    """Of each token."""
    total: Annotated[int, Field(ge=1)] = 500
    """Of all. Over HTTP each takes a file descriptor."""
    recheck_s: Annotated[float, Field(gt=0, le=300)] = 5.0
    """Between two looks whether the token of an open stream is still good."""


class SlackConfig(Config):
    """Slack's address; see docs/guide/slack-and-webhooks.md."""

    api_url: Annotated[str, shaped(r"^https?://[^/\s]+/([^\s]*/)?$", "must be an https:// address that ends in /")] = (
        "https://slack.com/api/"
    )
    """GovSlack: `https://slack-gov.com/api/`. Plaintext on loopback only."""

    @field_validator("api_url")
    @classmethod
    def _private(cls, url: str) -> str:
        """Tokens are not to be read on a network."""
        parts = urlsplit(url)
        if parts.scheme != "https" and not _loopback(parts.hostname or ""):
            raise ValueError("must be https, since tokens go there")
        return url


class DigestConfig(Config):
    """What was spent, told once a day and once a week."""

    at: time = time(9)
    """Local time, `09:00`: the day before is told, and on Mondays the week before."""
    zone: Annotated[str, Field(max_length=64)] = "UTC"
    """IANA name, e.g. Europe/Berlin."""
    daily: bool = True
    """Every day."""
    weekly: bool = True
    """Every Monday."""

    @field_validator("at")
    @classmethod
    def _local(cls, at: time) -> time:
        if at.tzinfo is not None:
            raise ValueError("must have no offset; `zone` says whose time it is")
        return at

    @field_validator("zone")
    @classmethod
    def _known(cls, zone: str) -> str:
        try:
            ZoneInfo(zone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError("is no IANA time zone; give one as Europe/Berlin") from None
        return zone


class NotifyConfig(Config):
    """Telling people; see docs/guide/slack-and-webhooks.md."""

    insecure_hosts: tuple[str, ...] = ()
    """Hosts of your own that webhooks may reach at any address, and by plain HTTP."""
    keep_days: Annotated[float, Field(gt=0)] = 7.0
    """How long a delivery waits for a channel that takes nothing."""
    keep_deliveries: Annotated[int, Field(ge=1)] = 100_000
    """How many wait for one channel; the oldest are given up beyond."""
    digest: DigestConfig = DigestConfig()
    """What was spent, told once a day and once a week."""


class SpendGuardConfig(Config):
    """What is watched of prices; see docs/guide/caps-and-budgets.md."""

    price_rise_percent: Annotated[Decimal, Field(ge=0, le=1000)] = Decimal(2)
    """An offer that has become dearer by more since it was quoted is not bought: the job is quoted again."""


Days = Annotated[float, Field(ge=0, le=36_500)] | None


class RetentionConfig(Config):
    """For how many days after a job's end what it left is kept, where its spec does not say; null: for ever."""

    artifacts_days: Days = None
    """The results of finished jobs."""
    checkpoints_days: Days = 30.0
    """All other checkpoints: those that a retry or a raised cap goes on from."""
    logs_days: Days = 90.0
    """Logs, and what else belongs to an attempt."""
    data_days: Days = 30.0
    """A job's own copy of its data set or code, which a retry needs."""
    uploads_days: Days = 30.0
    """Uploads, after somebody last sent them; jobs have copies of their own."""


class DaemonConfig(Config):
    """Everything that `gpubroker serve` can be told."""

    home: Path = Field(default_factory=default_home)
    """State folder, 0700; without it `$XDG_STATE_HOME/gpubroker`, else `~/.local/state/gpubroker`."""
    host: str = LOOPBACK
    """Where the HTTP API listens."""
    port: Annotated[int, Field(ge=0, le=65535)] = 7070
    """0 takes a free one."""
    grpc: GrpcConfig = GrpcConfig()
    """The same API by gRPC; see docs/reference/grpc.md."""
    tls: TlsConfig | None = None
    """Certificate of the HTTP and the gRPC API. Without one they listen on loopback only."""
    database_url: str | None = None
    """A PostgreSQL server; without it one is embedded in the home."""
    blobs: str | None = None
    """`file:///…`, `s3://bucket/prefix`, `gs://…` or `az://…`; without it a folder in the home."""
    blob_options: dict[str, str] = Field(default_factory=dict, repr=False)
    """Options for the object store (endpoint, region, …); credentials better come from the environment."""
    storage_usd_per_gib_month: Annotated[Decimal, Field(ge=0, le=1000)] | None = None
    """What the blob store costs; absent: by its kind, see docs/design/money.md."""
    retention: RetentionConfig = RetentionConfig()
    """How long what jobs left is kept; see docs/guide/caps-and-budgets.md."""
    guard: SpendGuardConfig = SpendGuardConfig()
    """What is watched of prices; see docs/guide/caps-and-budgets.md."""
    grants: GrantsConfig = GrantsConfig()
    """Credentials that attempts get for the store; see docs/guide/images-and-storage.md."""
    providers: ProvidersConfig = ProvidersConfig()
    """Which clouds, each with its settings; see docs/design/providers.md."""
    trainer: TrainerConfig = TrainerConfig()
    """What rented machines run; see docs/guide/images-and-storage.md."""
    upload_max_bytes: Annotated[int, Field(ge=1)] = 512 * 1024**2
    """Of a data set or code archive. Up to four at once lie in the home until the blob store has them."""
    rate_limit: RateLimitConfig = RateLimitConfig()
    """More is answered with 429 and the time to wait."""
    streams: StreamsConfig = StreamsConfig()
    """More is answered with 429, like what comes too fast."""
    slack: SlackConfig = SlackConfig()
    """Channels themselves are added with `gpubroker channel add`."""
    notify: NotifyConfig = NotifyConfig()
    """Webhooks, the outbox and the digest; channels themselves are added with `gpubroker channel add`."""
    rhythm: RhythmConfig = RhythmConfig()
    """How often the daemon looks."""
    limits: LimitsConfig = LimitsConfig()
    """Rhythms and patience of every agent."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Of the log on stderr, which is redacted."""

    @field_validator("home")
    @classmethod
    def _expanded(cls, home: Path) -> Path:
        try:
            return home.expanduser().absolute()
        except RuntimeError:
            raise ValueError(f"{home}: there is no such user; give an absolute path") from None

    @field_validator("blobs")
    @classmethod
    def _a_store(cls, url: str | None) -> str | None:
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
        """None: no gRPC; 0: a free one."""
        if self.grpc.port != "next":
            return self.grpc.port
        return self.port + 1 if 0 < self.port < 65535 else 0

    @property
    def blobs_url(self) -> str:
        return self.blobs or (self.home / "blobs").absolute().as_uri()

    @classmethod
    def load(cls, path: Path | None = None, *, env: Mapping[str, str] = os.environ, **overrides: Any) -> Self:
        """Reads the file (by default the home's, if there), the environment, then the `overrides` that are not None.

        Raises InvalidInput naming the option, the variable, or the key and the file.
        """
        home = overrides.get("home") or default_home()
        file = path or home / CONFIG_FILE
        values: dict[str, Any] = {"home": home, **_read(file, required=path is not None)}
        said = {key: env[name] for key, name in VARIABLES.items() if env.get(name)}
        given = {key: value for key, value in overrides.items() if value is not None}
        values |= said | given
        try:
            config = cls.model_validate(values)
            wrong = _plaintext(config)
        except ValidationError as e:
            wrong = of_validation(e, cls, values).problems
        if wrong:
            named = {key: VARIABLES[key] for key in said} | {key: f"--{key}" for key in given}
            raise InvalidInput(*(_placed(problem, named, file) for problem in wrong))
        return config


def _placed(problem: Problem, named: Mapping[str, str], file: Path) -> Problem:
    """By the option or the variable that gave the key, else by the file."""
    if (name := named.get(problem.field.partition(".")[0])) is not None:
        return Problem(field=name, message=problem.message)
    return Problem(field=problem.field, message=f"{problem.message} (in {file})")


def _plaintext(config: DaemonConfig) -> tuple[Problem, ...]:
    """Tokens and specs are not to be read on a network."""
    if config.tls is not None:
        return ()
    hosts = {"host": config.host} | ({} if config.grpc_port is None else {"grpc.host": config.grpc_host})
    for field, host in hosts.items():
        if not _loopback(host):
            message = f"{host} is no loopback address; give tls.certificate and tls.key, or use {LOOPBACK}"
            return (Problem(field=field, message=message),)
    return ()


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read(file: Path, *, required: bool) -> dict[str, Any]:
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
        values: dict[str, Any] = yamlfile.parse(text, str(file), may_be_empty=True).data
    except yamlfile.BadYaml as e:
        raise InvalidInput(Problem(field="--config", message=str(e))) from None
    return values

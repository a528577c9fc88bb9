"""`JobSpec`: what a person asks for. YAML or JSON; the published JSON Schema is generated from this file."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field, model_validator

from broker.domain.gpu_names import gpu_name
from broker.domain.ids import JobId
from trainer.contract.base import Config, Text, shaped
from trainer.contract.script import ScriptConfig
from trainer.contract.train import CheckpointConfig, TrainConfig

RetryCause = Literal[
    "preempted", "lost", "no_capacity", "rejected", "mismatch", "hung", "deadman", "infrastructure", "oom"
]
RETRY_ALWAYS: tuple[RetryCause, ...] = (
    "preempted", "lost", "no_capacity", "rejected", "mismatch", "hung", "deadman", "infrastructure", "oom",
)  # fmt: skip

MOST_NODES = 16
"""Machines of one attempt."""
Name = Annotated[
    str, shaped(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", "must be 1 to 63 of a-z, 0-9 and -, with no - at an end")
]
EnvName = Annotated[
    str,
    shaped(r"^[A-Za-z_][A-Za-z0-9_]{0,127}$", "must be 1 to 128 letters, digits and _, with no digit at the beginning"),
]
Accelerator = Annotated[
    str,
    shaped(r"^[ -~]*[A-Za-z0-9][ -~]*$", "must be a GPU's name, for example H100", max_length=100),
    AfterValidator(gpu_name),
]
"""A GPU as people write it, held as the hardware table does."""
Usd = Annotated[Decimal, Field(gt=0, le=1_000_000, max_digits=13, decimal_places=6)]


Days = Annotated[float, Field(ge=0, le=36_500)]


def _instant(value: Any) -> Any:
    """A number would be taken for seconds since 1970, and YAML knows no times."""
    if isinstance(value, datetime):
        return value
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is no time; write it as 2026-01-31T12:00:00Z") from None


def _in_utc(at: datetime) -> datetime:
    try:
        at.astimezone(UTC)
    except OverflowError:
        raise ValueError("is outside of the years 1 to 9999 of UTC") from None
    return at


Moment = Annotated[AwareDatetime, AfterValidator(_in_utc)]
"""What a database can hold."""
Instant = Annotated[Moment, BeforeValidator(_instant)]


class AwsOptions(Config):
    """Where on AWS, and on what disk. Buckets are the daemon's matter: see `blob_options`."""

    vpc: Annotated[Text, Field(min_length=1, max_length=255)] | None = None
    """`Name` tag of the VPC; absent: the region's default one."""
    subnets: Annotated[tuple[Annotated[Text, Field(min_length=1, max_length=255)], ...], Field(max_length=16)] = ()
    """`Name` tags of public subnets; empty: any of the VPC."""
    encrypted_volume: bool = True
    """Encrypt the machine's disk."""
    kms_key: (
        Annotated[str, shaped(r"^[A-Za-z0-9:/_-]{1,2048}$", "must be the id, the ARN or the alias of a key")] | None
    ) = None
    """Key (id, ARN or alias) that the disk is encrypted with; absent: the account's default key for volumes."""

    @model_validator(mode="after")
    def _key_of_something(self) -> Self:
        if self.kms_key and not self.encrypted_volume:
            raise ValueError("kms_key encrypts the volume, but encrypted_volume is false; drop one of them")
        return self


class Resources(Config):
    """Limits on what may be bought; everything is allowed that is not excluded."""

    gpus: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = "auto"
    """Number of GPUs; `auto` takes what the estimate needs."""
    nodes: Annotated[int, Field(ge=1, le=MOST_NODES)] = 1
    """Machines that train together; AWS and Lambda join several. Of each step of a training they take equal parts, so
    they must divide `global_batch`, and its micro-batches where `micro_batch` is a number. Of a script the first one's
    checkpoint folder is saved, and comes back on all of them."""
    accelerators: Annotated[tuple[Accelerator, ...], Field(max_length=32)] = ()
    """Names such as `h100-sxm`, `a100-80gb`, `l40s`, `rtx4090`, or as nvidia-smi and shops write them (`NVIDIA
    A100-SXM4-80GB`); `a100` means all of that name. Empty: any."""
    providers: Annotated[tuple[Name, ...], Field(max_length=32)] = ()
    """Empty: every provider that is configured."""
    regions: Annotated[tuple[Annotated[Text, Field(max_length=64)], ...], Field(max_length=64)] = ()
    spot: Literal["allowed", "never", "only"] = "allowed"
    trust: Literal["community", "secure", "own"] = "community"
    """Whose hosts may be used: anybody's, only data centres' that a cloud answers for, or only one's own."""
    objective: Literal["cheapest", "hourly", "fastest", "balanced"] = "cheapest"
    """Which of the offers that are left is taken: least expected dollars to finish, least dollars an hour, least
    expected time, or the least product of expected dollars and time."""
    max_usd_per_hour: Usd | None = None
    aws: AwsOptions = AwsOptions()


class Retry(Config):
    """When a new attempt follows one that did not complete."""

    max: Annotated[int, Field(ge=0, le=1000)] = 5
    """Retries after the first attempt; a stop by the dead-man's switch costs none."""
    on: Annotated[tuple[RetryCause, ...], Field(max_length=16)] = RETRY_ALWAYS


class Retention(Config):
    """For how long what a job left in the blob store is kept, in days after its end; 0: not at all."""

    artifacts_days: Days | None = None
    """The finished job's last checkpoint, which holds its results; absent: as the daemon is configured."""
    checkpoints_days: Days | None = None
    """All others; of a job that has not succeeded they are what a retry goes on from."""
    logs_days: Days | None = None
    data_days: Days | None = None
    """The job's own copy of its data set or code, which a retry needs."""


IdleAction = Literal["notify", "drain", "end"]
"""Tell people; checkpoint and end; or end at once."""


IdleKind = Literal["gpu", "no_progress", "download"]
"""GPUs that do nothing; no new step; set-up that stands still."""


Window = Annotated[int, Field(ge=60, le=604_800)]


class IdlePolicy(Config):
    """When a machine counts as idle, and what follows. Progress of the trainer itself overrules an idle GPU."""

    action: IdleAction = "notify"
    """For idle GPUs and missing progress: `notify`, `drain` (checkpoint, then end) or `end`; the job fails then."""
    gpu_below: Annotated[float, Field(ge=0, le=1)] = 0.05
    """A GPU that is used less than this is idle; 0 never."""
    window_s: Window = 900
    """Seconds for which every sample must say so, while no step and no checkpoint is finished."""
    no_progress_s: Window = 1500
    """Seconds without a new step, once there was one; the daemon itself ends what is stuck for 1800."""
    download_action: IdleAction = "end"
    """For set-up that stands still (model, data, imports); `end` lets the job go on elsewhere, as `retry` allows."""
    download_s: Window = 1800
    """Seconds of set-up in which nearly nothing was received and nothing was said."""


class JobSpec(Config):
    """A training job."""

    name: Name
    cap_usd: Usd
    """The job never spends more than this, whatever happens."""
    train: TrainConfig | None = None
    """Fine-tune with the built-in trainer; exactly one of `train` and `script`."""
    script: ScriptConfig | None = None
    resources: Resources = Resources()
    checkpoint: CheckpointConfig = CheckpointConfig()
    retry: Retry = Retry()
    env: Annotated[
        dict[EnvName, Annotated[Text, Field(max_length=32_768)]], Field(max_length=128, default_factory=dict)
    ]
    """Plain environment variables of the program; use `secrets` for what must not be seen."""
    secrets: Annotated[tuple[EnvName, ...], Field(max_length=64)] = ()
    """Names of secrets stored with `gpubroker secret set NAME`; the program sees them as environment variables."""
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """Among queued jobs a higher one is looked at first, among equals the older one."""
    labels: Annotated[dict[Name, Annotated[Text, Field(max_length=256)]], Field(max_length=64, default_factory=dict)]
    init_from: Annotated[str, shaped(r"^job/[a-z2-7]{13}$", "must be job/ID, with the whole id of a job")] | None = None
    """`job/<id>`: continue from the last checkpoint of another job."""
    deadline: Instant | None = None
    """A time with its zone, e.g. `2026-01-31T12:00:00Z`: checkpointed and ended by then, unless it is done."""
    max_duration: Annotated[int, Field(ge=60, le=31_536_000)] | None = None
    """Seconds for which its machines may stand, over all attempts; then as at the deadline."""
    retention: Retention = Retention()
    idle: IdlePolicy | None = None
    """When a machine counts as idle, and what follows; absent: as the team's policy says."""
    keep_on_failure: Annotated[int, Field(ge=0, le=86_400)] = 0
    """Seconds for which a machine on which the job failed is kept, to look at it with `gpubroker ssh`; it bills."""

    @property
    def origin(self) -> JobId | None:
        """The job that `init_from` names."""
        return None if self.init_from is None else JobId(self.init_from.removeprefix("job/"))

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.train is None) == (self.script is None):
            raise ValueError("give exactly one of train and script")
        reserved = [n for n in (*self.env, *self.secrets) if n.startswith("GPUBROKER_")]
        if reserved:
            raise ValueError(f"{reserved[0]}: names that start with GPUBROKER_ are the broker's own; rename it")
        both = sorted(set(self.env) & set(self.secrets))
        if both:
            raise ValueError(f"{both[0]} is in env and in secrets; keep one")
        named = {"output": self.train.output.secrets, "metrics": self.train.metrics.secrets} if self.train else {}
        if absent := [(place, name) for place, names in named.items() for name in names if name not in self.secrets]:
            raise ValueError(f"train.{absent[0][0]}: it needs the secret {absent[0][1]}; list it in secrets")
        if self.train and (local := self.train.metrics.local):
            raise ValueError(f"train.metrics.{local}: is lost with the machine; only `python -m trainer` takes it")
        return self


def idle_policy(own: IdlePolicy | None, of_team: IdlePolicy | None) -> IdlePolicy:
    """The job's own counts, then its team's, then the defaults."""
    return own or of_team or IdlePolicy()

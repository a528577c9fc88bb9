"""`JobSpec`: a user's request, as YAML or JSON. The published JSON Schema is generated from this module."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field, model_validator

from broker.domain.gpu_names import gpu_name
from broker.domain.ids import JobId
from trainer.contract.base import MOMENT_EXAMPLES, Config, InDays, InSeconds, Text, matching, moment
from trainer.contract.script import ScriptConfig
from trainer.contract.train import CheckpointConfig, TrainConfig

RetryCause = Literal[
    "preempted", "lost", "no_capacity", "rejected", "mismatch", "hung", "deadman", "infrastructure", "oom"
]
RETRY_ALWAYS: tuple[RetryCause, ...] = (
    "preempted", "lost", "no_capacity", "rejected", "mismatch", "hung", "deadman", "infrastructure", "oom",
)  # fmt: skip

MAX_NODES = 16
"""Maximum number of machines of one attempt."""
Name = Annotated[
    str, matching(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", "must be 1 to 63 of a-z, 0-9 and -, with no - at an end")
]
EnvName = Annotated[
    str,
    matching(
        r"^[A-Za-z_][A-Za-z0-9_]{0,127}$", "must be 1 to 128 letters, digits and _, with no digit at the beginning"
    ),
]
Accelerator = Annotated[
    str,
    matching(r"^[ -~]*[A-Za-z0-9][ -~]*$", "must be a GPU's name, for example H100", max_length=100),
    AfterValidator(gpu_name),
]
"""A GPU name in any spelling, stored in its canonical form."""
Usd = Annotated[Decimal, Field(gt=0, le=1_000_000, max_digits=13, decimal_places=6)]


Days = Annotated[float, Field(ge=0, le=36_500), InDays]


def _instant(value: Any) -> Any:
    """Return a datetime.

    Numbers are refused because they would be read as seconds since 1970, and YAML has no times.
    """
    if isinstance(value, datetime):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a time with its zone; write it as {MOMENT_EXAMPLES}")
    return moment(value)


def _in_utc(at: datetime) -> datetime:
    try:
        at.astimezone(UTC)
    except OverflowError:
        raise ValueError("is outside of the years 1 to 9999 of UTC") from None
    return at


Moment = Annotated[AwareDatetime, AfterValidator(_in_utc)]
"""A time that a database can store."""
Instant = Annotated[Moment, BeforeValidator(_instant)]


class AwsOptions(Config):
    """Network and disk settings on AWS.

    The daemon configures buckets: see `blob_options`.
    """

    vpc: Annotated[Text, Field(min_length=1, max_length=255)] | None = None
    """`Name` tag of the VPC; absent: the region's default one."""
    subnets: Annotated[tuple[Annotated[Text, Field(min_length=1, max_length=255)], ...], Field(max_length=16)] = ()
    """`Name` tags of public subnets; empty: any of the VPC."""
    encrypted_volume: bool = True
    """Encrypt the machine's disk."""
    kms_key: (
        Annotated[str, matching(r"^[A-Za-z0-9:/_-]{1,2048}$", "must be the id, the ARN or the alias of a key")] | None
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
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] = 1
    """Machines that train together; AWS and Lambda support several. The machines share each training step equally, so
    their number must divide `global_batch`, and if `micro_batch` is a number, also the number of micro-batches. For a
    script, the first machine's checkpoint folder is saved and restored on all machines.
    """
    accelerators: Annotated[tuple[Accelerator, ...], Field(max_length=32)] = ()
    """Names such as `h100-sxm`, `a100-80gb`, `l40s`, `rtx4090`, or as nvidia-smi and sellers write them (`NVIDIA
    A100-SXM4-80GB`). `a100` matches every A100. Empty: any.
    """
    providers: Annotated[tuple[Name, ...], Field(max_length=32)] = ()
    """Providers to use; empty: every configured one."""
    regions: Annotated[tuple[Annotated[Text, Field(max_length=64)], ...], Field(max_length=64)] = ()
    spot: Literal["allowed", "never", "only"] = "allowed"
    trust: Literal["community", "secure", "own"] = "community"
    """Hosts that may be used. `community`: any host; `secure`: vetted data centres; `own`: your machines."""
    objective: Literal["cheapest", "hourly", "fastest", "balanced"] = "cheapest"
    """Criterion of choice, always the least: expected dollars to finish (`cheapest`), dollars an hour (`hourly`),
    expected time (`fastest`), or dollars times time (`balanced`).
    """
    max_usd_per_hour: Usd | None = None
    cpus: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Least CPU cores (vCPUs) of each machine. An offer whose cloud does not state them is dropped. Absent: what the
    estimate needs, for a script any.
    """
    memory_gb: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Least RAM of each machine in GB of 10⁹ bytes, by the same rules as `cpus`."""
    disk_gb: Annotated[int, Field(ge=1, le=16_384)] | None = None
    """Least disk of each machine in GB of 10⁹ bytes, system and image included, by the same rules as `cpus`. AWS,
    RunPod and Vast sell larger disks than the usual 100 to 200 GB; the quote then includes their price.
    """
    aws: AwsOptions = AwsOptions()


class Retry(Config):
    """Rules for a new attempt after one that did not complete."""

    max: Annotated[int, Field(ge=0, le=1000)] = 5
    """Retries after the first attempt; a preemption or a stop by the dead-man's switch costs none."""
    on: Annotated[tuple[RetryCause, ...], Field(max_length=16)] = RETRY_ALWAYS


class Retention(Config):
    """Days after a job's end for which its data in the blob store is kept, as numbers or `12h`, `7d`; 0: none."""

    artifacts_days: Days | None = None
    """The finished job's last checkpoint, which holds its results; absent: as the daemon is configured."""
    checkpoints_days: Days | None = None
    """All other checkpoints; a retry of a job that has not succeeded resumes from them."""
    logs_days: Days | None = None
    data_days: Days | None = None
    """The job's own copy of its data set or code, which a retry needs."""


IdleAction = Literal["notify", "drain", "end"]
"""Notify users; checkpoint and end; or end at once."""


IdleKind = Literal["gpu", "no_progress", "download"]
"""Unused GPUs; no new step; set-up without progress."""


Window = Annotated[int, Field(ge=60, le=604_800), InSeconds]


class IdlePolicy(Config):
    """Conditions under which a machine counts as idle, and the action to take.

    Times are seconds, or durations such as `15m`. Progress that the trainer reports overrules an idle GPU.
    """

    action: IdleAction = "notify"
    """Action for idle GPUs and missing progress: `notify`, `drain` (checkpoint, then end) or `end`. After `drain` or
    `end` the job has failed.
    """
    gpu_below: Annotated[float, Field(ge=0, le=1)] = 0.05
    """GPU utilisation (0 to 1) below which a GPU is idle; 0: never."""
    window_s: Window = 900
    """Seconds for which every sample must show an idle GPU, while no step and no checkpoint finishes."""
    no_progress_s: Window = 1500
    """Seconds without a new step, after the first one; the daemon itself ends an attempt that is stuck for 1800."""
    download_action: IdleAction = "end"
    """Action for set-up without progress (model, data, imports); `end` lets the job continue elsewhere, as `retry`
    allows.
    """
    download_s: Window = 1800
    """Seconds of set-up in which almost nothing was received and nothing was reported."""


class JobSpec(Config):
    """A training job."""

    name: Name
    cap_usd: Usd
    """The job never spends more than this."""
    train: TrainConfig | None = None
    """Fine-tune with the built-in trainer; exactly one of `train` and `script`."""
    script: ScriptConfig | None = None
    resources: Resources = Resources()
    checkpoint: CheckpointConfig = CheckpointConfig()
    retry: Retry = Retry()
    env: Annotated[
        dict[EnvName, Annotated[Text, Field(max_length=32_768)]], Field(max_length=128, default_factory=dict)
    ]
    """Plain environment variables of the program; use `secrets` for values that must not be shown."""
    secrets: Annotated[tuple[EnvName, ...], Field(max_length=64)] = ()
    """Names of secrets stored with `gpubroker secret set NAME`; the program gets them as environment variables."""
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """Order of placement: of the queued jobs the highest priority is placed first, of equal ones the oldest."""
    labels: Annotated[dict[Name, Annotated[Text, Field(max_length=256)]], Field(max_length=64, default_factory=dict)]
    init_from: Annotated[str, matching(r"^job/[a-z2-7]{13}$", "must be job/ID, with the whole id of a job")] | None = (
        None
    )
    """`job/<id>`: continue from the last checkpoint of another job."""
    deadline: Instant | None = None
    """A time with its zone, e.g. `2026-01-31T12:00:00Z`, or a date in UTC; an unfinished job is checkpointed and ended
    by then. The command line also takes a time from now, such as `6h`.
    """
    max_duration: Annotated[int, Field(ge=60, le=31_536_000), InSeconds] | None = None
    """Maximum time for which its machines may exist, over all attempts, as seconds or `1h30m`; then the job ends as at
    its deadline.
    """
    hour_worth_usd: Annotated[Decimal, Field(ge=0, le=1_000_000, max_digits=13, decimal_places=6)] = Decimal(5)
    """Dollars that an hour of delay is worth to a job without a deadline. A wait for sold-out spot ends when it has
    cost what spot saves, and a move pays for its delay. 0: the job waits for the cheapest offer without limit.
    """
    retention: Retention = Retention()
    idle: IdlePolicy | None = None
    """Conditions under which a machine counts as idle, and the action to take; absent: as the team's policy says."""
    keep_on_failure: Annotated[int, Field(ge=0, le=86_400), InSeconds] = 0
    """Time for which a machine on which the job failed is kept for inspection with `gpubroker ssh`, as seconds or
    `15m`; it bills.
    """

    def with_train(self, train: TrainConfig | None) -> Self:
        """Return the spec with another training config; the same spec if the config is the same."""
        return self if train is self.train else self.model_copy(update={"train": train})

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
        duplicates = sorted(set(self.env) & set(self.secrets))
        if duplicates:
            raise ValueError(f"{duplicates[0]} is in env and in secrets; keep one")
        named = {"output": self.train.output.secrets, "metrics": self.train.metrics.secrets} if self.train else {}
        if absent := [(place, name) for place, names in named.items() for name in names if name not in self.secrets]:
            raise ValueError(f"train.{absent[0][0]}: it needs the secret {absent[0][1]}; list it in secrets")
        if self.train and (local := self.train.metrics.local):
            raise ValueError(f"train.metrics.{local}: is lost with the machine; only `python -m trainer` takes it")
        return self


def idle_policy(job_policy: IdlePolicy | None, team_policy: IdlePolicy | None) -> IdlePolicy:
    """Return the job's own idle policy, or its team's, or the default."""
    return job_policy or team_policy or IdlePolicy()

"""Machines as clouds list them, and the parameters that start one."""

from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Literal

from broker.domain.ids import JobId
from broker.domain.job import Handle
from broker.domain.offer import Trust


class InstanceState(StrEnum):
    """State of a machine. `unknown` is never treated as dead."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPED = "stopped"
    """The machine exists and may bill: it is ours until it is destroyed."""
    GONE = "gone"
    """The cloud reports that the machine was taken away or has exited: it neither runs nor bills."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class OrphanMachine:
    """A machine with the installation's name prefix that belongs to no live attempt."""

    provider: str
    id: str
    """Id of the machine at its cloud."""
    name: str
    why: str
    """Why it is an orphan, in one line."""
    since: datetime | None
    """Creation time by the cloud's clock; None: the cloud does not report it."""
    usd_per_hour: Decimal | None
    """Price that the cloud reports; None: it reports none."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One machine with our name prefix, from the cloud's own listing."""

    handle: Handle
    state: InstanceState
    accelerator: str | None = None
    gpus: int | None = None
    gpu_memory_bytes: int | None = None
    """Bytes of one GPU; None: unknown."""
    spot: bool | None = None
    usd_per_hour: Decimal | None = None
    """Price that the cloud reports for this machine; None: it reports none."""
    price_moves: bool = False
    """True when `usd_per_hour` is the current market price: a rise does not indicate another machine."""
    notice_s: float | None = None
    """Seconds until the cloud takes the machine away; None: no notice was given."""
    created_at: datetime | None = None
    """Creation time by the cloud's clock; None: it reports none."""
    fault: str | None = None
    """Why the machine will never run its agent, as its launcher or cloud reports, in one line; None: no fault."""
    image_refused: bool = False
    """True when the fault is the image registry's answer, which is the same on every machine."""


class Liveness(StrEnum):
    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


SelfStop = Literal["instance_key", "os_shutdown", "none"]
Notices = Literal["imds", "first_process", "off"]
"""Source of preemption notices: AWS metadata service, SIGTERM to the container's first process, or none."""


@dataclass(frozen=True, kw_only=True)
class Caps:
    """Capabilities and promises of a provider; times in seconds."""

    spot: bool
    notice_s: float = 0.0
    notices: Notices = "off"
    list_lag_s: float = 0.0
    """Longest time for which a listing may omit a created machine or still show a destroyed one."""
    teardown_s: float = 5.0
    """Time from destroy to the end of billing, as the cloud states it."""
    boot_s: float = 60.0
    """Typical time from create to the first heartbeat."""
    boot_deadline_s: float = 1200.0
    billing_quantum_s: int = 1
    multi_node: bool = False
    images: bool = False
    """True: its machines are containers, which may run the image of a job."""
    trust: Trust = "secure"
    self_stop: SelfStop = "none"
    reaches_local_files: bool = False
    runs_on_host: bool = False
    """True: its jobs are processes of the daemon's host; see `broker.policy.host_access`."""
    named_only: bool = False
    """True: only jobs whose spec names the provider (`resources.providers`) use it."""
    simulated: bool = False
    has_trainer: bool = True
    """False: its machines lack what the built-in trainer needs; scripts still run."""
    accelerators: frozenset[str] | None = None
    """GPUs that the provider can ever sell; None: not known, so any."""
    lists_all: bool = False
    """True: a listing contains everything that the provider can ever sell, sold-out offers included."""
    calls_per_s: float = 10.0
    """API calls per second that the cloud allows one account."""
    agent_start_s: float | None = None
    """Seconds after which a machine without a heartbeat never will send one, once its launcher is dead. None: a machine
    starts its agent without a launcher.
    """


@dataclass(frozen=True, kw_only=True)
class TrainerImage:
    """The operator's container image, pinned by digest."""

    reference: str
    """`registry/name@sha256:…`"""
    username: str = ""
    password: str = field(default="", repr=False)
    """Password of a private registry. Both `username` and `password` are empty for a public one."""


@dataclass(frozen=True, kw_only=True)
class TrainerBundle:
    """The trainer's code and its recipe as one tar in the blob store, for a cloud's stock PyTorch image."""

    url: str = field(repr=False)
    """Signed URL, which lets its holder read this one object for a limited time."""
    sha256: str


@dataclass(frozen=True, kw_only=True)
class CloudOptions:
    """Network and disk settings that the job's owner asks for, where the cloud has them (AWS)."""

    vpc: str | None = None
    """`Name` tag of the VPC; None: the default one."""
    subnets: tuple[str, ...] = ()
    """`Name` tags of the subnets; empty: any public one."""
    encrypted_volume: bool = True
    kms_key: str | None = None
    """Key that encrypts the volume; None: the account's default key."""


@dataclass(frozen=True, kw_only=True)
class HostIsolation:
    """Job on the daemon's host that must not run as the daemon's user. The ids select its part of the blob store."""

    job: JobId
    origin: JobId | None = None
    """The job whose checkpoints this one starts from."""


@dataclass(frozen=True, kw_only=True)
class BootSpec:
    """Parameters that an instance needs to start the agent."""

    env: dict[str, str] = field(default_factory=dict)
    """Environment of the agent that may be shown."""
    secret_env: dict[str, str] = field(default_factory=dict, repr=False)
    """Environment that must not be shown or logged: the attempt's key, store credentials."""
    nodes: int = 1
    options: CloudOptions = CloudOptions()
    image: str | None = None
    """Container image of the job; None: the daemon's image."""
    trainer: TrainerImage | TrainerBundle | None = None
    """The trainer for a rented machine; None where it is installed already (local, simulated)."""
    job: JobId | None = None
    """The job that runs on the instance, which a busy host names; None: not known."""
    isolation: HostIsolation | None = None
    """Set: a machine that is processes of the daemon's host must run them in a sandbox."""


SELF_STOP_S = 1800.0
"""Seconds that a machine of an ended attempt waits for the broker's destroy before it shuts itself down."""

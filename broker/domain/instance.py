"""What a cloud shows of its machines, and what it is given to start one."""

from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Literal

from broker.domain.job import Handle
from broker.domain.offer import Trust


class InstanceState(StrEnum):
    """Three-valued towards life: `unknown` is never taken for dead."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPED = "stopped"
    """Exists and may bill: ours until destroyed."""
    GONE = "gone"
    """The cloud itself says that it was taken away or has exited; nothing runs and nothing bills."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One machine under our prefix, from the cloud's own listing."""

    handle: Handle
    state: InstanceState
    accelerator: str | None = None
    gpus: int | None = None
    gpu_memory_bytes: int | None = None
    """Of one GPU."""
    spot: bool | None = None
    usd_per_hour: Decimal | None = None
    """What the cloud bills for it, read back; None when it does not say."""
    price_moves: bool = False
    """That is the market's price by now: a rise is no sign of another machine."""
    notice_s: float | None = None
    """Seconds until it is taken away, if the cloud says so."""
    created_at: datetime | None = None
    """By the cloud's clock; None when it does not say."""
    fault: str | None = None
    """Why it will never run its agent, as its launcher or its cloud says: one line for people."""
    image_refused: bool = False
    """The fault is the image's registry's answer, which is the same anywhere."""


class Liveness(StrEnum):
    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


SelfStop = Literal["instance_key", "os_shutdown", "none"]
Notices = Literal["imds", "first_process", "off"]
"""Where a machine is told of its end: AWS's metadata service, a SIGTERM to its container's first process, nowhere."""


@dataclass(frozen=True, kw_only=True)
class Caps:
    """What a provider can and promises; times in seconds."""

    spot: bool
    notice_s: float = 0.0
    notices: Notices = "off"
    list_lag_s: float = 0.0
    """A created or destroyed machine may be missing from, or still in, listings for so long."""
    teardown_s: float = 5.0
    """From destroy to the end of billing, as the cloud states it."""
    boot_s: float = 60.0
    """Typical time from create to the first beat."""
    boot_deadline_s: float = 1200.0
    billing_quantum_s: int = 1
    multi_node: bool = False
    trust: Trust = "secure"
    self_stop: SelfStop = "none"
    reaches_local_files: bool = False
    simulated: bool = False
    has_trainer: bool = True
    """False: its machines lack what the built-in trainer needs; scripts run all the same."""
    calls_per_s: float = 10.0
    """Of its API by one account, as the cloud states it."""
    agent_start_s: float | None = None
    """None: a machine starts its agent by itself. Else its launcher does, and once that is dead, a machine without a
    beat after so many seconds never will."""


@dataclass(frozen=True, kw_only=True)
class TrainerImage:
    """The operator's container image, pinned by digest."""

    reference: str
    """`registry/name@sha256:…`"""
    username: str = ""
    password: str = field(default="", repr=False)
    """Login of a private registry; both empty: public."""


@dataclass(frozen=True, kw_only=True)
class TrainerBundle:
    """The trainer's code and its recipe as one tar in the blob store, for a cloud's stock PyTorch image."""

    url: str = field(repr=False)
    """Signed: whoever has it may read this one object for a while."""
    sha256: str


@dataclass(frozen=True, kw_only=True)
class CloudOptions:
    """What the job's owner asks of the machine's surroundings, where the cloud has such a thing (AWS)."""

    vpc: str | None = None
    """Its `Name` tag; None: the default one."""
    subnets: tuple[str, ...] = ()
    """Their `Name` tags; empty: any public one."""
    encrypted_volume: bool = True
    kms_key: str | None = None
    """Of the volume; None: the account's default."""


@dataclass(frozen=True, kw_only=True)
class BootSpec:
    """What the instance needs to start the agent."""

    env: dict[str, str] = field(default_factory=dict)
    """Plain environment of the agent."""
    secret_env: dict[str, str] = field(default_factory=dict, repr=False)
    """Environment that must not be shown or logged: the attempt's key, store credentials."""
    nodes: int = 1
    options: CloudOptions = CloudOptions()
    trainer: TrainerImage | TrainerBundle | None = None
    """How a rented machine gets the trainer; None where it is there already (local, simulated)."""


SELF_STOP_S = 1800.0
"""How long a machine whose attempt is over waits for the broker to destroy it, before it shuts itself down."""

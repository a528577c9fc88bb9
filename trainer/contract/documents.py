"""Documents that broker and trainer exchange through the blob store, and the outcomes of an attempt."""

from datetime import datetime
from decimal import Decimal
from enum import IntEnum, StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.contract.base import Document, Message, Name, Number, ObjectPath, Text
from trainer.contract.script import ScriptConfig
from trainer.contract.train import CheckpointConfig, TrainConfig

CONTRACT_VERSION = 1

Seconds = Annotated[float, Field(allow_inf_nan=False)]
"""Finite number of seconds. JSON has no NaN: it would be written as null and could not be read back."""
Count = Annotated[int, Field(ge=0, le=2**53)]
"""Bytes, in the range that databases and all JSON parsers can hold."""

Setting = Annotated[str, Field(max_length=1 << 20)]
"""Value of a variable, an option or a secret."""


class Outcome(StrEnum):
    """Ending of an attempt as its agent reports it."""

    COMPLETED = "completed"
    DRAINED = "drained"
    """Stopped on request; everything up to `manifest` is saved."""
    USER_ERROR = "user_error"
    """The program or the configuration is at fault; a retry cannot help."""
    DATA = "data"
    """The dataset is at fault; a retry cannot help."""
    OOM = "oom"
    INFRASTRUCTURE = "infrastructure"
    """The machine, the network or the store is at fault; another machine may help."""
    DEADMAN = "deadman"
    """The broker's lease became stale; the agent saved and stopped on its own."""


class ExitCode(IntEnum):
    """Exit codes of the worker. The agent maps every other code to a user error (script) or infrastructure (train)."""

    COMPLETED = 0
    DRAINED = 70
    USER_ERROR = 64
    DATA = 65
    OOM = 71
    INFRASTRUCTURE = 75
    BACK = 72
    """The worker must be restarted from an earlier step; only the train worker uses this code."""


class Limits(Document):
    """Intervals and timeouts of the agent, in seconds."""

    heartbeat_s: float = 5.0
    poll_s: float = 5.0
    """Seconds between reads of `desired.json` and the broker's lease."""
    log_s: float = 5.0
    deadman_s: float = 900.0
    """Age of the broker's lease in seconds after which the agent saves and stops. 0 means never."""
    outage_s: float = 7200.0
    """Seconds for which the agent trains on while the store cannot be reached."""
    drain_s: float = 120.0
    """Seconds from a drain request to the end, the last checkpoint included."""


class DataFile(Document):
    """Input object; its hash is checked before use."""

    key: ObjectPath
    sha256: Name
    bytes: int
    format: Literal["csv", "json", "jsonl", "parquet", "tar", "zip"]


class Parallelism(Document):
    """Distribution of the model over the processes of a job."""

    kind: Literal["ddp", "fsdp"] = "ddp"
    """`ddp`: each process holds the whole model. `fsdp`: weights, gradients and optimizer states are divided."""
    shard: Annotated[int, Field(ge=0)] = 0
    """`fsdp`: number of processes that share one copy; 0: all. More processes hold further copies (hybrid sharding);
    on several nodes the GPUs of one node are the usual choice.
    """
    offload: bool = False
    """`fsdp`: parameter shards and the optimizer stay in host memory."""
    tensor: Annotated[int, Field(ge=1)] = 1
    """`fsdp`: number of neighbouring processes that compute every layer together (tensor parallelism)."""
    context: Annotated[int, Field(ge=1)] = 1
    """`fsdp`: number of processes that each compute one shard of the same sequences; `shard` counts processes with
    different rows.
    """

    @model_validator(mode="after")
    def _one_kind(self) -> "Parallelism":
        if self.kind == "ddp" and self.tensor * self.context > 1:
            raise ValueError("tensor and context divide the model's work: set kind to fsdp")
        return self


class World(Document):
    """Number of processes that train together, and their parallelism."""

    nodes: int = 1
    gpus_per_node: int = 0
    """GPUs of each node; 0: one process on the CPU of each node."""
    parallelism: Parallelism = Parallelism()


class MemoryUse(Document):
    """Estimated memory of one device, in bytes, as used for the plan."""

    weights: Count
    gradients: Count
    optimizer: Count
    activations: Count
    """Activations, logits included."""


class Cost(Document):
    """Costs in dollars that the broker knows when an attempt begins."""

    before: Annotated[Decimal, Field(ge=0)]
    """Cost of the job's other attempts."""
    per_hour: Annotated[Decimal, Field(ge=0)]
    """Price per hour of all machines of this attempt."""


class AttemptSpec(Document):
    """Everything the trainer needs (`attempts/<attempt>/spec.json`); secrets are listed by name only."""

    version: int = CONTRACT_VERSION
    installation: Name
    job: Name
    attempt: Name
    number: int
    """Number of the attempt within its job, from 1."""
    cost: Cost | None = None
    """None: costs are unknown."""
    memory: MemoryUse | None = None
    """None: memory was not estimated."""
    run: Name = ""
    """Name of the job's run for trackers; empty: the job's id."""
    train: TrainConfig | None = None
    script: ScriptConfig | None = None
    """Exactly one of `train` and `script` is set."""
    data: DataFile | None = None
    code: DataFile | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    probe: bool = False
    """Memory use is unknown: the longest rows are tried once after the first step, before the long run."""
    resume_from: tuple[ObjectPath, ...] = ()
    """Keys of committed manifests, newest first; the first that verifies is used."""
    date: Name = ""
    """Date of the job, as YYYY-MM-DD, which chat templates render as today's; empty: the machine's date."""
    token_cache_bytes: Count = 0
    """Largest token cache in bytes that is stored for later attempts; 0: never stored."""
    losses_per_hour: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Expected preemptions and failures per hour, over all machines of the attempt."""
    env: dict[ObjectPath, Setting] = Field(default_factory=dict)
    secrets: tuple[ObjectPath, ...] = ()
    """Names of the secrets; `grant.json` holds the sealed values."""
    world: World = World()
    limits: Limits = Limits()


class Desired(Document):
    """State that the broker requests (`attempts/<attempt>/desired.json`).

    A document with a lower (epoch, seq) is ignored. A drain or stop cannot be revoked.
    """

    want: Literal["run", "drain", "stop"] = "run"
    epoch: Number = 0
    seq: Number = 0
    reason: Message = ""

    def newer_than(self, other: "Desired") -> bool:
        """Return True if this document replaces `other`: higher (epoch, seq), and no weaker request."""
        strength = {"run": 0, "drain": 1, "stop": 2}
        return (self.epoch, self.seq) > (other.epoch, other.seq) and strength[self.want] >= strength[other.want]


READER = "reader."
"""Prefix of store options for reading and listing. If there are any, the options without it are for writing and
deleting. Two sets are needed where credentials have the same permission for all objects that they reach.
"""


class Grant(Document):
    """Sealed credentials (`attempts/<attempt>/grant.json`); the attempt's key (Fernet) opens `sealed` to a `Sealed`."""

    seq: Number = 0
    expires_at: datetime | None = None
    sealed: Setting


class Sealed(Document):
    """Content of a grant: store options (renewed credentials) and values of the job's secrets."""

    store_options: dict[ObjectPath, Setting] = Field(default_factory=dict)
    secrets: dict[ObjectPath, Setting] = Field(default_factory=dict)
    grant_url: Setting = ""
    """URL that reads `grant.json` without credentials, so that expired credentials can be renewed."""


class CheckpointRef(Document):
    """Committed checkpoint."""

    manifest: ObjectPath
    """Key of its manifest.json."""
    step: Number
    save_s: Seconds = 0.0
    """Seconds of work: the snapshot and the upload that succeeded, without waits for the store."""
    stall_s: Seconds = 0.0
    """Seconds for which the training loop was blocked."""
    bytes: Count = 0
    """Size of all files in bytes."""


class AgentMessage(Document):
    """Message for the user, for example a skipped step or a failed save."""

    seq: Number
    """Number of the message, from 1 in each start of the agent."""
    kind: Annotated[str, Field(pattern=r"^[a-z]+(_[a-z]+)*$", max_length=40)]
    message: Annotated[Text, Field(max_length=500)]


MAX_MESSAGES = 8
"""Number of latest messages that each heartbeat and the final report repeat."""

Phase = Literal["starting", "loading", "setup", "evaluating", "training", "saving", "sampling", "draining", "done"]


class Heartbeat(Document):
    """Heartbeat and progress of one machine (`heartbeats/<attempt>/<node>`)."""

    attempt: Name
    node: Number = 0
    boot: Name
    """Random id of one start of the agent."""
    seq: Number
    phase: Phase = "starting"
    message: Message = ""
    step: Number = 0
    total_steps: Number = 0
    resumed_from: Number | None = None
    """Step of the checkpoint that this attempt continued from."""
    loss: float | None = None
    heldout_loss: float | None = None
    tokens_per_s: float | None = None
    rows_per_s: float | None = None
    peak_memory_bytes: Number | None = None
    gpu_utilisation: float | None = None
    """Mean utilisation of the node's GPUs, 0 to 1; None without GPUs."""
    gpu_memory_bytes: Count | None = None
    """Bytes in use by all programs on the GPU with the most in use."""
    gpu_power_w: float | None = None
    """Watts of all GPUs of the node together."""
    checkpoint: CheckpointRef | None = None
    notice_s: float | None = None
    """Seconds until the machine is preempted, if its provider announced that to the machine."""
    messages: Annotated[tuple[AgentMessage, ...], Field(max_length=MAX_MESSAGES)] = ()
    sent_bytes: Count = 0
    """Bytes sent to the blob store since this start of the agent."""
    received_bytes: Count = 0
    """Bytes received from the blob store since this start of the agent."""
    network_bytes: Count | None = None
    """Bytes that this machine has received from any source; they distinguish a slow download from one that hangs."""


class Final(Document):
    """Final report of an attempt (`attempts/<attempt>/final.json`), written once."""

    attempt: Name
    outcome: Outcome
    message: Message = ""
    """One line: place, problem and fix."""
    exit_code: Number | None = None
    ran_out: Literal["device", "host"] | None = None
    """Memory that ran out when the outcome is `oom`."""
    bad_host: bool = False
    """True if the host check before the training found this machine unfit."""
    step: Number = 0
    total_steps: Number = 0
    resumed_from: Number | None = None
    checkpoint: CheckpointRef | None = None
    """Last committed checkpoint; after `completed` it also holds the artifacts."""
    heldout_loss_before: float | None = None
    heldout_loss_after: float | None = None
    peak_memory_bytes: Number | None = None
    tokens_per_s: float | None = None
    messages: Annotated[tuple[AgentMessage, ...], Field(max_length=MAX_MESSAGES)] = ()
    boot: Name = ""
    """Boot id of the agent that wrote the report; the counters belong to that start."""
    sent_bytes: Count = 0
    received_bytes: Count = 0


class ManifestFile(Document):
    path: ObjectPath
    """ObjectPath below the checkpoint's `files/`; never absolute, never with `..`."""
    bytes: Count
    sha256: Name


class Manifest(Document):
    """Manifest of a checkpoint (`manifest.json`).

    It is put last and only if absent: a checkpoint without a manifest does not exist.
    """

    version: int = CONTRACT_VERSION
    job: Name
    attempt: Name
    step: Number
    kind: Literal["train", "script"]
    files: tuple[ManifestFile, ...]
    complete: bool = False
    """True if the checkpoint holds the job's final artifacts."""
    save_s: float = 0.0
    """Seconds of work, as in `CheckpointRef`."""


class TokenCacheManifest(Document):
    """Manifest of a token cache (`manifest.json`), put last and only if absent."""

    version: int = CONTRACT_VERSION
    job: Name
    attempt: Name
    number: Number
    """Number of the attempt; the newest cache is the likeliest to be usable."""
    identity: Name
    data_sha256: Name
    pieces: tuple[ManifestFile, ...]
    """Pieces `<file>/<number>`, in order for each file."""


class Lease(Document):
    """Lease of the broker (`broker/lease`), read by the agents' dead-man's switch.

    It is renewed while a broker with a working database runs.
    """

    broker: ObjectPath
    seq: Number
    every_s: float
    """Longest time in seconds between two renewals by a live broker."""
    home: ObjectPath = ""
    """Id of the daemon's home, the same over all its starts."""
    clouds: dict[ObjectPath, ObjectPath] = Field(default_factory=dict)
    """Resources of each cloud that this broker can query: see broker/runtime/peers.py."""
    database: ObjectPath = ""
    """Id of the database that the broker uses; a copy has another id. Empty: unknown."""

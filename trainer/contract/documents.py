"""The documents that broker and trainer exchange through the blob store, and the outcomes of an attempt."""

from datetime import datetime
from decimal import Decimal
from enum import IntEnum, StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.contract.base import Document, Text
from trainer.contract.script import ScriptConfig
from trainer.contract.train import CheckpointConfig, TrainConfig

CONTRACT_VERSION = 1

Seconds = Annotated[float, Field(allow_inf_nan=False)]
"""JSON has no NaN: one that got in would be written as null, and could not be read again."""
Count = Annotated[int, Field(ge=0, le=2**53)]
"""Bytes, within what a database and every JSON parser can hold."""


class Outcome(StrEnum):
    """How an attempt ended, as the agent saw it."""

    COMPLETED = "completed"
    DRAINED = "drained"
    """Stopped on request, with everything up to `manifest` safe."""
    USER_ERROR = "user_error"
    """The program or the configuration is at fault: a retry cannot help."""
    DATA = "data"
    """The data set is at fault: a retry cannot help."""
    OOM = "oom"
    INFRASTRUCTURE = "infrastructure"
    """The machine, the network or the store is at fault: another machine may help."""
    DEADMAN = "deadman"
    """The broker's lease went stale; saved and stopped without being told."""


class ExitCode(IntEnum):
    """What the worker process tells the agent; every other code is a user error (script) or infrastructure (train)."""

    COMPLETED = 0
    DRAINED = 70
    USER_ERROR = 64
    DATA = 65
    OOM = 71
    INFRASTRUCTURE = 75
    BACK = 72
    """Of the worker alone: it is to be started again from an earlier step."""


class Limits(Document):
    """Rhythms and patience of the agent, in seconds."""

    beat_s: float = 5.0
    poll_s: float = 5.0
    """How often `desired.json` and the broker's lease are read."""
    log_s: float = 5.0
    deadman_s: float = 900.0
    """Without a fresh broker lease for so long: checkpoint and stop. 0 means never."""
    outage_s: float = 7200.0
    """How long the agent trains on while the store cannot be reached."""
    drain_s: float = 120.0
    """From a drain request to the end, the last checkpoint included."""


class DataFile(Document):
    """One input object, checked by hash before use."""

    key: str
    sha256: str
    bytes: int
    format: Literal["csv", "json", "jsonl", "parquet", "tar", "zip"]


class Parallelism(Document):
    """How the processes of a job share the model."""

    kind: Literal["ddp", "fsdp"] = "ddp"
    """`ddp`: each process holds all of it. `fsdp`: weights, gradients and optimizer states are divided."""
    shard: Annotated[int, Field(ge=0)] = 0
    """`fsdp`: how many processes share one copy; 0: all. Where there are more processes, they hold further copies
    (hybrid); on several nodes the GPUs of one node are the usual choice."""
    offload: bool = False
    """`fsdp`: the shares and the optimizer stay in host memory."""
    tensor: Annotated[int, Field(ge=1)] = 1
    """`fsdp`: so many processes next to each other compute every layer together."""
    context: Annotated[int, Field(ge=1)] = 1
    """`fsdp`: so many of these compute a stretch of the same sequences each; `shard` counts those with other rows."""

    @model_validator(mode="after")
    def _one_kind(self) -> "Parallelism":
        if self.kind == "ddp" and self.tensor * self.context > 1:
            raise ValueError("tensor and context divide the model's work: set kind to fsdp")
        return self


class World(Document):
    """How many processes train together, and how."""

    nodes: int = 1
    gpus_per_node: int = 0
    """0: one process on the CPU of each node."""
    parallelism: Parallelism = Parallelism()


class MemoryUse(Document):
    """Of one device, in bytes, as the plan was made by."""

    weights: Count
    gradients: Count
    optimizer: Count
    activations: Count
    """With the logits."""


class Cost(Document):
    """What the broker knows of it when an attempt begins, in dollars."""

    before: Annotated[Decimal, Field(ge=0)]
    """Of the job's other attempts."""
    per_hour: Annotated[Decimal, Field(ge=0)]
    """Of this one's machines together."""


class AttemptSpec(Document):
    """`attempts/<attempt>/spec.json`: everything the trainer needs; secrets by name only."""

    version: int = CONTRACT_VERSION
    installation: str
    job: str
    attempt: str
    number: int
    """1 for the first attempt of the job."""
    cost: Cost | None = None
    """None: nobody knows."""
    memory: MemoryUse | None = None
    """None: it was not estimated."""
    run: str = ""
    """Names the job's run to trackers; the job's id where it is empty."""
    train: TrainConfig | None = None
    script: ScriptConfig | None = None
    """Exactly one of `train` and `script`."""
    data: DataFile | None = None
    code: DataFile | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    probe: bool = False
    """Nobody knows what it takes: its longest rows go through once after its first step, before the long run."""
    resume_from: tuple[str, ...] = ()
    """Keys of committed manifests, newest first; the first that verifies is used."""
    rows_bytes: Count = 0
    """Tokenised rows are put into the store for later attempts where they have no more bytes; 0: never."""
    losses_per_hour: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """How often these machines, together, are expected to be taken away or to fail."""
    env: dict[str, str] = Field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    """Names; the values come sealed in `grant.json`."""
    world: World = World()
    limits: Limits = Limits()


class Desired(Document):
    """`attempts/<attempt>/desired.json`: what the broker wants; lower (epoch, seq) are ignored, no way back to run."""

    want: Literal["run", "drain", "stop"] = "run"
    epoch: int = 0
    seq: int = 0
    reason: str = ""

    def newer_than(self, other: "Desired") -> bool:
        """True when this one replaces `other`: a higher (epoch, seq), and no way back from drain or stop."""
        strength = {"run": 0, "drain": 1, "stop": 2}
        return (self.epoch, self.seq) > (other.epoch, other.seq) and strength[self.want] >= strength[other.want]


READER = "reader."
"""Store options that start with it are for reading and listing, the others then for writing and deleting: for stores
whose credentials have one permission for all they reach."""


class Grant(Document):
    """`attempts/<attempt>/grant.json`: `sealed` opens with the attempt's key (Fernet) to a `Sealed` as JSON."""

    seq: int = 0
    expires_at: datetime | None = None
    sealed: str


class Sealed(Document):
    """What a grant carries: store options (renewed credentials) and the values of the job's secrets."""

    store_options: dict[str, str] = Field(default_factory=dict)
    secrets: dict[str, str] = Field(default_factory=dict)
    grant_url: str = ""
    """Reads `grant.json` without credentials, so that ones that have ended can still be renewed."""


class CheckpointRef(Document):
    """A committed checkpoint."""

    manifest: str
    """Key of its manifest.json."""
    step: int
    save_s: Seconds = 0.0
    """Seconds of work: the snapshot, and the upload that came to its end; not what it waited for the store."""
    stall_s: Seconds = 0.0
    """Seconds for which the training loop stood still."""
    bytes: Count = 0
    """Of all its files."""


class AgentMessage(Document):
    """Something that people should hear of: a step that was left out, a save that failed."""

    seq: int
    """From 1, within one start of the agent."""
    kind: Annotated[str, Field(pattern=r"^[a-z]+(_[a-z]+)*$", max_length=40)]
    message: Annotated[Text, Field(max_length=500)]


TOLD = 8
"""The latest ones that a beat and the last word repeat."""

Phase = Literal["starting", "loading", "evaluating", "training", "saving", "sampling", "draining", "done"]


class Beat(Document):
    """`beats/<attempt>/<node>`: the sign of life and the progress."""

    attempt: str
    node: int = 0
    boot: str
    """Random for each start of the agent."""
    seq: int
    phase: Phase = "starting"
    message: str = ""
    step: int = 0
    total_steps: int = 0
    resumed_from: int | None = None
    """Step of the checkpoint that this attempt continued from."""
    loss: float | None = None
    heldout_loss: float | None = None
    tokens_per_s: float | None = None
    rows_per_s: float | None = None
    peak_memory_bytes: int | None = None
    gpu_utilisation: float | None = None
    """0..1 of the node's GPUs; absent without one."""
    gpu_memory_bytes: Count | None = None
    """In use by whatever program, of the GPU that has the most in use."""
    gpu_power_w: float | None = None
    """Of the node's GPUs together."""
    checkpoint: CheckpointRef | None = None
    notice_s: float | None = None
    """Seconds until the machine is taken away, if its provider said so to the machine."""
    told: Annotated[tuple[AgentMessage, ...], Field(max_length=TOLD)] = ()
    sent_bytes: Count = 0
    """To the blob store, since this start of the agent."""
    received_bytes: Count = 0
    """From the blob store, likewise."""
    network_bytes: Count | None = None
    """All that this machine has received, from wherever: tells a slow download from one that hangs."""


class Final(Document):
    """`attempts/<attempt>/final.json`, put once: how the attempt ended."""

    attempt: str
    outcome: Outcome
    message: str = ""
    """One line: what, where and the fix."""
    exit_code: int | None = None
    ran_out: Literal["device", "host"] | None = None
    """Whose memory it was, where the outcome is `oom`."""
    bad_host: bool = False
    """The check of this machine before the training found it unfit."""
    step: int = 0
    total_steps: int = 0
    resumed_from: int | None = None
    checkpoint: CheckpointRef | None = None
    """The last committed checkpoint; after `completed` it holds the artifacts too."""
    heldout_loss_before: float | None = None
    heldout_loss_after: float | None = None
    peak_memory_bytes: int | None = None
    tokens_per_s: float | None = None
    told: Annotated[tuple[AgentMessage, ...], Field(max_length=TOLD)] = ()
    boot: str = ""
    """Of the agent that wrote this; the counters are that one's."""
    sent_bytes: Count = 0
    received_bytes: Count = 0


class ManifestFile(Document):
    path: str
    """Below the checkpoint's `files/`; never absolute, never with `..`."""
    bytes: Annotated[int, Field(ge=0)]
    sha256: str


class Manifest(Document):
    """`manifest.json`, put last and only if absent: a checkpoint without one does not exist."""

    version: int = CONTRACT_VERSION
    job: str
    attempt: str
    step: int
    kind: Literal["train", "script"]
    files: tuple[ManifestFile, ...]
    complete: bool = False
    """True for the one that holds the job's final artifacts."""
    save_s: float = 0.0
    """As of `CheckpointRef`."""


class RowsManifest(Document):
    """`manifest.json` of tokenised rows, put last and only if absent."""

    version: int = CONTRACT_VERSION
    job: str
    attempt: str
    number: int
    """Of the attempt: what was made last is the likeliest to be of use."""
    identity: str
    data_sha256: str
    pieces: tuple[ManifestFile, ...]
    """Of each file those in their order, `<file>/<number>`."""


class Lease(Document):
    """`broker/lease`: changed while a broker with a working database is there; the agents' dead-man's switch."""

    broker: str
    seq: int
    every_s: float
    """Between two touches: how long one that lives may leave it as it is."""
    home: str = ""
    """Which daemon's, over its starts."""
    clouds: dict[str, str] = Field(default_factory=dict)
    """What it can ask about machines: see broker/runtime/peers.py."""
    database: str = ""
    """Which one it works on: a copy is another one. Empty: that is not known."""

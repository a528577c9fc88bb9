"""The needs of a job (model shape, plan, memory), and measurements of attempts for later estimates."""

from dataclasses import dataclass
from typing import Literal

from broker.domain.ids import AttemptId

Parallelism = Literal["single", "ddp", "fsdp", "hybrid"]
"""`fsdp`: all devices share one copy of all states; `hybrid`: the devices of each machine share one copy."""
DIVIDED: frozenset[Parallelism] = frozenset({"fsdp", "hybrid"})

SpeedTier = Literal["measured", "transferred", "unchecked"]
"""Evidence of the speed. `measured`: own runs of this GPU, method and family; `transferred`: runs of this architecture
in other laboratories or on other GPUs; `unchecked`: no similar run.
"""


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Peak bytes of one device by category.

    `source`: the evidence for it; `margin`: share that is added to it.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    context: int
    margin: float
    source: str
    correction: float = 1.0
    """Factor of own runs on the sum of the categories."""
    floor: int = 0
    """Bytes of a device that an own run needed; 0: unknown."""
    runs: int = 0
    """Number of own runs behind this estimate."""

    @property
    def peak(self) -> int:
        """Bytes that the training process allocates, without the margin and the device context."""
        by_category = self.weights + self.gradients + self.optimizer + self.activations + self.logits
        return int(by_category * self.correction)

    @property
    def required(self) -> int:
        """Bytes that a device must have."""
        return max(self.floor, int((self.peak + self.context) * (1 + self.margin)))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Division of a job among the devices of one kind of machine.

    The user sets the global batch: micro_batch x accumulation x devices.
    """

    parallelism: Parallelism = "single"
    devices: int = 1
    """Devices of all machines together that get rows in every step."""
    micro_batch: int
    accumulation: int = 1
    """Micro-batches of one device in a step."""
    gradient_checkpointing: bool = False


@dataclass(frozen=True, kw_only=True)
class Tower:
    """Vision part of a language model. Rows of text do not reach it: its weights are held, and get no gradients."""

    parameters: int
    matrices: int
    """Weights of its linear modules, which a quantised base quantises too."""
    sides: int
    """Inputs plus outputs of its linear modules. A LoRA of rank r holds r weights for each."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The values of a model's config that determine memory and time."""

    name: str
    family: str
    """`model_type` of the config, e.g. `llama`."""
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied_embeddings: bool
    parameters: int
    """All parameters, with those of the tower."""
    known: bool
    """False: the closed form was not validated on this architecture."""
    max_positions: int | None = None
    gated_mlp: bool = True
    activation: str = "silu"
    parallel: bool = False
    """True when attention and MLP run in parallel."""
    parallel_norms: int = 1
    dropout: bool = False
    """True when the output of a layer passes through dropout."""
    head_norms: bool = False
    """True when queries and keys are normalised per head, as an exception in their family (Phi's `qk_layernorm`)."""
    softcap: bool = False
    """True when a hyperbolic tangent limits the logits."""
    window: int | None = None
    """Number of tokens of the attention window; longer rows need a mask. None: no window."""
    windowed: tuple[bool, ...] = ()
    """True for each layer that has the window; empty: all layers do, if there is one."""
    experts: int = 0
    """Experts of a mixture's layer, each with an MLP of the intermediate size; 0: not a mixture."""
    active_experts: int = 0
    """Number of experts that process every token."""
    head: Literal["tokens", "text", "words", "image"] = "tokens"
    """Output of the model: the next token, or a class of the text (`text`), of each token (`words`) or of an image."""
    labels: int = 0
    """Number of classes of the head."""
    head_parameters: int = 0
    """Parameters of the head that a LoRA trains whole; 0: there are no classes."""
    pooled_adapter: bool = False
    """True when BERT's pooler gets an adapter because it contains a module called `dense`."""
    looked_up: tuple[int, ...] = ()
    """Row counts of the embedding tables that are added to the word embeddings."""
    pixels: int = 0
    """Values of one image, whose tokens are always its `max_positions` patches; 0: no image."""
    decoder_layers: int = 0
    """Decoder layers of an encoder-decoder, whose other fields describe the encoder; 0: one stack."""
    decoder_intermediate: int = 0
    inner_dropout: bool = False
    """True when the input of the MLP's last matrix of an encoder-decoder passes through dropout too."""
    attention_dropout: bool = False
    """True when attention weights pass through dropout; only eager attention keeps their mask."""
    buckets: int = 0
    """Number of relative positions in T5's attention; 0: positions are embedded."""
    tower: Tower | None = None
    """Vision part that is loaded with the language model; None: there is none."""
    bundled: bool = False
    """True when the config is from the bundled catalogue: the Hub was not asked, or did not answer."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A job as the estimators see it."""

    shape: ModelShape | None
    """None: a script, or a task without an estimator; its memory and time are unknown."""
    unestimated: str = ""
    """Why there is no shape, in words; empty for a script."""
    task: str = "causal_lm"
    sequences: int = 1
    """Sequences that the model processes for each row: dpo compares two."""
    reference: int = 0
    """Forward passes over all sequences without gradients in addition, most by the base under the adapters."""
    method: Literal["full", "lora", "qlora", "lora8", "script"]
    """`qlora`: LoRA over a base of 4 bits, `lora8` over one of 8."""
    lora_r: int = 0
    lora_targets: str = "all-linear"
    """`all-linear`, `attention`, or names of modules separated by commas."""
    optimizer: str = "adamw_fused"
    attention: Literal["sdpa", "flash", "eager"] = "sdpa"
    precision: str = "auto"
    gradient_checkpointing: bool = False
    micro_batch: int = 1
    free_checkpointing: bool = False
    """True: the plan chooses checkpointing, and `gradient_checkpointing` applies only without a plan."""
    free_micro_batch: bool = False
    """True: the plan chooses the micro-batch, and `micro_batch` applies only without a plan."""
    max_micro_batch: int = 0
    """Largest micro-batch allowed after this job ran out of memory; 0: no limit."""
    memory_factor: float = 1.0
    """Factor on the memory estimate after this job ran out of memory."""
    oom_device_bytes: int = 0
    """Device size in bytes on which the smallest plan ran out of memory; devices up to this size are too small. 0:
    none.
    """
    oom_shards: int = 1
    """Number of shards of that failed plan: devices of this size are allowed with more shards."""
    oom_micro_batch: int = 0
    """Largest micro-batch allowed on more shards after that failure; 0: no limit."""
    oom_host_bytes: int = 0
    """Host memory in bytes on which the smallest plan ran out of memory; 0: none."""
    global_batch: int = 1
    sequence: int = 512
    """Tokens of the longest row, for memory."""
    tokens_per_row: float = 512.0
    """Mean tokens of a row, for time."""
    target_tokens: int = 0
    """Tokens that an encoder-decoder writes for the longest row."""
    target_tokens_per_row: float = 0.0
    """Mean tokens that an encoder-decoder writes for a row."""
    steps: int = 0
    """Optimizer steps still to do."""
    eval_rows: int = 0
    """Held-out rows times the number of evaluations."""
    checkpoint_every_s: float = 300.0
    data_bytes: int = 0
    """Size of the data set."""
    keeps_best: bool = False
    """True when the weights of the best evaluation so far are kept in the host's memory."""
    merges: bool = False
    """True when adapters are merged into another copy of the base at the end."""

    @property
    def counted_per_row(self) -> float:
        """Tokens that the trainer counts for a row in its tokens/s.

        All tokens that the model reads and writes count; an image counts as one.
        """
        if self.shape is not None and self.shape.pixels:
            return 1.0
        return self.sequences * self.tokens_per_row + self.target_tokens_per_row


@dataclass(frozen=True, kw_only=True)
class RunObservation:
    """Measurement of one attempt.

    It names no team, user, model or data set, so that it may serve all teams of an installation.
    """

    attempt_id: AttemptId
    hardware: str
    """Name in the hardware table of the device that computed."""
    plan: Plan
    nodes: int
    cores: int
    """Number of CPU cores of one machine, where it computes on its CPU."""
    workload: Workload
    """Workload whose model has no name."""
    tokens_per_s: float | None = None
    """Tokens/s of all devices over the last steps; None: there were too few steps."""
    peak_bytes: int | None = None
    """Peak bytes of one device: torch's peak allocation, or on a CPU the process's memory. None: not measured."""
    device_bytes: int = 0
    """Memory of one device; 0: unknown."""
    out_of_memory: bool = False
    """True when the job needed more than `device_bytes`."""


@dataclass(frozen=True, kw_only=True)
class SpotHours:
    """Total machine time and preemptions of all teams' spot machines of one cloud, region and GPU."""

    provider: str
    """Provider key; it separates a simulated cloud from the real one."""
    cloud: str
    region: str
    accelerator: str
    hours: float
    """Hours for which the machines existed or still exist; every node counts."""
    preemptions: int

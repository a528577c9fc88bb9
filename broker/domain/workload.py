"""What a job needs: the shape of its model, what a step takes, and how devices share it."""

from dataclasses import dataclass
from typing import Literal

Parallelism = Literal["single", "ddp", "fsdp", "hybrid"]
"""`fsdp`: all is divided between all devices; `hybrid`: within each machine, and repeated on every one."""
DIVIDED: frozenset[Parallelism] = frozenset({"fsdp", "hybrid"})

SpeedTier = Literal["measured", "transferred", "unchecked"]
"""Whether runs that the speed's interval is from were of its architecture and of its GPU; of its architecture, but on
other GPUs or otherwise divided; or none was of its like."""


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Peak bytes of one device by category. `source`: the evidence behind it; `margin`: share added for it."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    context: int
    margin: float
    source: str
    correction: float = 1.0
    """What own runs make of the sum of the categories."""
    floor: int = 0
    """Bytes of a device that such a run was seen to need."""
    runs: int = 0
    """Own runs that this rests on."""

    @property
    def peak(self) -> int:
        """What the training process allocates, bytes, without the margin and the device context."""
        by_category = self.weights + self.gradients + self.optimizer + self.activations + self.logits
        return int(by_category * self.correction)

    @property
    def required(self) -> int:
        """What a device must have, bytes."""
        return max(self.floor, int((self.peak + self.context) * (1 + self.margin)))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a job runs on one kind of machine. The global batch is the user's: micro_batch x accumulation x devices."""

    parallelism: Parallelism = "single"
    devices: int = 1
    """Of all machines together, that get rows in every step."""
    micro_batch: int
    accumulation: int = 1
    """Micro-batches of one device in a step."""
    gradient_checkpointing: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The numbers of a decoder's config that memory and time follow from."""

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
    known: bool
    """False: an architecture that the closed form was not validated on."""
    max_positions: int | None = None
    gated_mlp: bool = True
    activation: str = "silu"
    parallel: bool = False
    """Attention and MLP side by side."""
    parallel_norms: int = 1
    dropout: bool = False
    """What a layer adds is dropped out first."""
    head_norms: bool = False
    """Queries and keys are normalised head by head, though the family's are not as a rule (Phi's `qk_layernorm`)."""
    softcap: bool = False
    """Logits are bent by a hyperbolic tangent."""
    window: int | None = None
    """Tokens that a token looks back at; rows as long need a mask."""
    windowed: tuple[bool, ...] = ()
    """Which layers have that window; empty: all, where there is one."""
    experts: int = 0
    """Of a mixture's layer, each with an MLP of the intermediate size; 0: not a mixture."""
    active_experts: int = 0
    """How many of them every token goes through."""
    head: Literal["tokens", "text", "words", "image"] = "tokens"
    """What is made of the last hidden states: the next token, or a class of the text, of each of its tokens, of an
    image."""
    labels: int = 0
    """Classes of that head."""
    head_parameters: int = 0
    """Of the head that a LoRA trains whole; 0 where there are no classes."""
    pooled_adapter: bool = False
    """BERT's pooler gets an adapter where modules called `dense` do."""
    looked_up: tuple[int, ...] = ()
    """Rows of the embeddings that are added to those of the words."""
    pixels: int = 0
    """Numbers of one image; its patches are the tokens, `max_positions` of them, always."""
    decoder_layers: int = 0
    """Of an encoder-decoder, whose other fields are then its encoder's; 0: one stack."""
    decoder_intermediate: int = 0
    inner_dropout: bool = False
    """Of an encoder-decoder: what goes into the MLP's last matrix is dropped out too."""
    attention_dropout: bool = False
    """Attention's weights are, which only written-out attention keeps a mask of."""
    buckets: int = 0
    """Relative positions that T5's attention tells apart; 0: its positions are embedded."""
    bundled: bool = False
    """The config is that of the bundled catalogue: the Hub was not asked, or did not answer."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A job as the estimators see it."""

    shape: ModelShape | None
    """None: a script, or a task that nobody estimates; neither its memory nor its time is known."""
    unestimated: str = ""
    """Why there is no shape, in words; empty for a script."""
    task: str = "causal_lm"
    sequences: int = 1
    """Of each row, that go through the model: dpo compares two."""
    reference: bool = False
    """The model under its adapters looks at all of them too, without gradients."""
    method: Literal["full", "lora", "qlora", "lora8", "script"]
    """`qlora`: LoRA over a base of 4 bits, `lora8` over one of 8."""
    lora_r: int = 0
    lora_targets: str = "all-linear"
    """`all-linear`, `attention`, or names of modules with commas between."""
    optimizer: str = "adamw_fused"
    attention: Literal["sdpa", "flash", "eager"] = "sdpa"
    precision: str = "auto"
    gradient_checkpointing: bool = False
    micro_batch: int = 1
    free_checkpointing: bool = False
    """The plan chooses; `gradient_checkpointing` is only what holds where nobody plans."""
    free_micro_batch: bool = False
    """As above, for `micro_batch`."""
    max_micro_batch: int = 0
    """The largest micro-batch, since this very job has run out of memory; 0: any."""
    memory_factor: float = 1.0
    """What the memory estimate is multiplied by, likewise."""
    oom_device_bytes: int = 0
    """Devices with at most so many bytes are too small: it ran out there with the least plan."""
    oom_shards: int = 1
    """But where the model is divided between more of them than this, as it was there."""
    oom_micro_batch: int = 0
    """And then with no more rows at once than it had there; 0: any."""
    oom_host_bytes: int = 0
    """The same of the machine's own memory."""
    global_batch: int = 1
    sequence: int = 512
    """Tokens of the longest row, for memory."""
    tokens_per_row: float = 512.0
    """Mean, for time."""
    target_tokens: int = 0
    """Tokens that an encoder-decoder writes of the longest row."""
    target_tokens_per_row: float = 0.0
    """Mean."""
    steps: int = 0
    """Optimizer steps still to do."""
    eval_rows: int = 0
    """Held-out rows times the number of evaluations."""
    checkpoint_every_s: float = 300.0
    data_bytes: int = 0
    """Of the data set."""
    keeps_best: bool = False
    """The weights of the best evaluation so far are kept in the machine's own memory."""
    merges: bool = False
    """Adapters are merged into another copy of the base at the end."""

    @property
    def counted_per_row(self) -> float:
        """What the trainer counts of a row in its tokens/s: all tokens that the model reads and writes; a picture is
        one.
        """
        if self.shape is not None and self.shape.pixels:
            return 1.0
        return self.sequences * self.tokens_per_row + self.target_tokens_per_row

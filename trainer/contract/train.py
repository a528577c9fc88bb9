"""`TrainConfig`: model, data and method of a fine-tune, for job specs and for `python -m trainer`."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from trainer.contract.architectures import NEEDS_LORA, REFERENCED
from trainer.contract.base import Config, InSeconds, Text, matching
from trainer.contract.data_config import DataConfig, TaskName, data_misuse_message
from trainer.contract.guard import GuardConfig, SelectionConfig
from trainer.contract.metrics import MetricsConfig
from trainer.contract.output import OutputConfig

Precision = Literal["auto", "bf16", "fp16", "fp32"]
OptimizerName = Literal["adamw", "adamw_8bit", "adafactor", "sgd"]
Attention = Literal["auto", "sdpa", "flash", "eager"]
MAX_UNPLANNED_ROWS = 4
"""Largest micro-batch if no plan gives one."""


PINNED = re.compile(r"[0-9a-f]{40}")
"""Pattern of a commit, a Hub revision that cannot move."""
TARGETS = ("all-linear", "attention")
Module = Annotated[Text, Field(min_length=1, max_length=256)]
Modules = Annotated[tuple[Module, ...], Field(min_length=1, max_length=64)]


class LowRank(Config):
    """Adapters added to the linear modules of a frozen base."""

    r: Annotated[int, Field(ge=1, le=1024)] = 16
    alpha: Annotated[int, Field(ge=1, le=4096)] = 32
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    targets: Literal["all-linear", "attention"] | Modules = "all-linear"
    """Modules with an adapter: all linear modules except the head, those of attention, or modules whose names end in an
    item of a list (`[q_proj, v_proj]`).
    """
    rslora: bool = False
    """Scale by alpha over the square root of r instead of r (arXiv 2312.03732): for large ranks."""
    dora: bool = False
    """Learn the magnitude of each weight's rows too (arXiv 2402.09353). Slower; its memory is not estimated."""

    @field_validator("targets", mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        """Replace a list of one keyword with the keyword, and any other list with a tuple."""
        if not isinstance(value, (list, tuple)):
            return value
        return value[0] if len(value) == 1 and value[0] in TARGETS else tuple(value)


class LoraConfig(LowRank):
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685)."""

    kind: Literal["lora"] = "lora"


class QloraConfig(LowRank):
    """Low-rank adapters over a quantised base (Dettmers et al. 2023, arXiv 2305.14314)."""

    kind: Literal["qlora"] = "qlora"
    bits: Literal[4, 8] = 4
    """Bits per weight of the base's linear modules: 4 (NF4 in blocks of 64, scales quantised again) or 8 (LLM.int8,
    arXiv 2208.07339). Head, norms and embeddings are not quantised.
    """

    @model_validator(mode="after")
    def _dora_over_four(self) -> Self:
        if self.dora and self.bits == 8:
            raise ValueError("dora: peft cannot do it over a base of 8 bits; use bits: 4, or leave it out")
        return self


class FullConfig(Config):
    """Training of every weight."""

    kind: Literal["full"] = "full"


Method = Annotated[LoraConfig | QloraConfig | FullConfig, Field(discriminator="kind")]


class OptimConfig(Config):
    """Optimizer, with linear warm-up and cosine decay to zero."""

    name: OptimizerName = "adamw"
    """`adamw_8bit` stores each of AdamW's moments in a byte (arXiv 2110.02861). `adafactor` stores sums of rows and
    columns instead (arXiv 1804.04235); its `lr` is relative to the size of the weights, 1e-3 to 1e-2. `sgd` stores
    nothing.
    """
    lr: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = "auto"
    """Highest learning rate, after the warm-up. `auto`: a published rate for the task, the method and the model's
    size, unchanged by resumes.
    """
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    warmup_share: Annotated[float, Field(ge=0, lt=1)] = 0.1
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    beta1: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """AdamW's first decay rate; other optimizers ignore `beta1` and `beta2`."""
    beta2: Annotated[float, Field(gt=0, lt=1)] = 0.999

    @model_validator(mode="after")
    def _rate_known(self) -> Self:
        if self.lr == "auto" and self.name == "sgd":
            raise ValueError("lr: no rate of sgd was published that goes for other models; give a number")
        return self


class DpoConfig(Config):
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290)."""

    beta: Annotated[float, Field(gt=0, le=100)] = 0.1
    """Strength with which the model is held to its initial state."""


class OrpoConfig(Config):
    """Odds ratio preference optimization (Hong et al. 2024, arXiv 2403.07691). It needs no reference."""

    beta: Annotated[float, Field(gt=0, le=100)] = 0.1
    """Weight of the odds ratio next to the cross-entropy of the better answer; lambda in the paper."""


class KtoConfig(Config):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv 2402.01306), of answers rated good or bad."""

    beta: Annotated[float, Field(gt=0, le=100)] = 0.1
    """Strength with which the model is held to its initial state."""
    desirable_weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Weight of good answers. The paper keeps the sum of weights of good answers at 1 to 4/3 of that of bad ones."""
    undesirable_weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Weight of bad answers."""


class DiffusionConfig(Config):
    """Settings of `text_to_image`: Stable Diffusion 1.x, 2.x and SDXL."""

    resolution: Annotated[int, Field(ge=16, le=2048, multiple_of=8)] | None = None
    """Pixels of a side; pictures are resized and cropped in the middle to this size. Absent: the model's own size."""
    min_snr: Annotated[float, Field(gt=0, le=100)] | None = None
    """Gamma of Min-SNR weighting (Hang et al. 2023, arXiv 2303.09556), 5 in the paper; absent: equal weights."""
    cache: bool = True
    """Keep the frozen parts' outputs for each row in the host memory of each process. They take about 0.4 MB a row
    for Stable Diffusion at 512 pixels, 1.2 MB for SDXL at 1024. The losses do not change.
    """
    sample_steps: Annotated[int, Field(ge=1, le=1000)] = 30
    """Denoising steps of a sample."""


class SamplesConfig(Config):
    """Texts that base and tuned model write for comparison (greedy decoding), or pictures (`text_to_image`)."""

    prompts: Annotated[tuple[Annotated[Text, Field(max_length=4096)], ...], Field(max_length=16)] = ()
    max_new_tokens: Annotated[int, Field(ge=1, le=1024)] = 48


class TrainConfig(Config):
    """Configuration of a fine-tune."""

    task: TaskName = "causal_lm"
    model: Annotated[Text, Field(min_length=1, max_length=1024)]
    """Hub id (`owner/name`), or a local folder with config.json, safetensors and tokenizer files."""
    revision: (
        Annotated[str, matching(r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$", "must be a branch, a tag or a commit")] | None
    ) = None
    """Branch, tag or commit of the model on the Hub; absent: `main`."""
    trust_remote_code: bool = False
    """Run the model's own code (`auto_map` of its config.json), which can read the job's secrets. For a Hub id
    `revision` must be a commit. Refused unless the daemon's `trainer.remote_code` lists the model. A run without a
    daemon also needs `--trust-remote-code`.
    """
    data: DataConfig
    method: Method = LoraConfig()
    optim: OptimConfig = OptimConfig()
    dpo: DpoConfig = DpoConfig()
    orpo: OrpoConfig = OrpoConfig()
    kto: KtoConfig = KtoConfig()
    diffusion: DiffusionConfig = DiffusionConfig()
    epochs: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Passes over the data. Ignored if `max_steps` is set."""
    max_steps: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Optimizer steps; absent: `epochs` decides."""
    global_batch: Annotated[int, Field(ge=1, le=65536)] | Literal["auto"] = 8
    """Rows per optimizer step over all devices; constant when the number of devices changes. `auto`: a published
    number for the task, the method and the rows, fixed at submission.
    """
    micro_batch: Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] = "auto"
    """Rows per forward pass of a device; must divide `global_batch`. `auto`: from the machine's plan; up to 4
    without a plan.
    """
    max_length: Annotated[int, Field(ge=8, le=1_048_576)] = 512
    """Tokens of a row; longer rows are truncated at the end."""
    packing: bool = False
    """`causal_lm`: concatenate the rows of a step to sequences of up to `max_length` tokens instead of padding. Each
    row attends only to itself, and the loss equals that of separate rows. `micro_batch` then counts sequences.
    """
    precision: Precision = "auto"
    """`auto`: bf16 where the device supports it, otherwise fp32."""
    tf32: bool = False
    """Multiply float32 matrices in TF32 if the GPU supports it: faster, with ten bits of mantissa."""
    fp8: bool = False
    """Method `full`: multiply in 8 bits in the layers, by torchao, if the GPU supports it (Ada, Hopper and later).
    Worthwhile with `compile` and large layers. Not available if FSDP or tensor parallelism divides the weights.
    """
    compile: bool = False
    """Compile each layer (torch.compile): faster steps after a first step that takes minutes."""
    attention: Attention = "auto"
    """`sdpa`: torch's fused kernels. `flash`: the flash-attn package, if installed. `eager`: the model's own code,
    which stores every score. `auto`: the model's default, sdpa for nearly all.
    """
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute activations instead of storing them. `auto`: from the plan; `false` without a plan."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 17
    eval_every_steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps between evaluations. Held-out loss is always measured before the first and after the last
    step.
    """
    guard: GuardConfig = GuardConfig()
    selection: SelectionConfig = SelectionConfig()
    samples: SamplesConfig = SamplesConfig()
    output: OutputConfig = OutputConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def micro_batch_rows(self) -> int:
        """Micro-batch; with `auto` the largest divisor of the global batch up to 4."""
        if self.micro_batch != "auto":
            return self.micro_batch
        return next(rows for rows in range(MAX_UNPLANNED_ROWS, 0, -1) if self.global_batch_rows % rows == 0)

    @property
    def global_batch_rows(self) -> int:
        """Global batch. Raises: ValueError while it is `auto`; `resolve_global_batch` sets a number."""
        if self.global_batch == "auto":
            raise ValueError("global_batch: auto has no number yet")
        return self.global_batch

    @property
    def adapters(self) -> LowRank | None:
        """Adapter settings, or None if every weight is trained."""
        return self.method if isinstance(self.method, LowRank) else None

    @property
    def quantised(self) -> QloraConfig | None:
        """QLoRA settings, or None if the base is not quantised."""
        return self.method if isinstance(self.method, QloraConfig) else None

    @property
    def recomputes(self) -> bool:
        """Return True if activations are recomputed."""
        return self.gradient_checkpointing is True

    @model_validator(mode="after")
    def _batches_divide(self) -> Self:
        settled = self.micro_batch != "auto" and self.global_batch != "auto"
        if settled and self.global_batch_rows % self.micro_batch_rows:
            raise ValueError(f"micro_batch {self.micro_batch} does not divide global_batch {self.global_batch}")
        return self

    @model_validator(mode="after")
    def _task_and_data_fit(self) -> Self:
        if wrong := data_misuse_message(self.task, self.data):
            raise ValueError(wrong)
        if len(set(self.data.labels)) < len(self.data.labels) or len(self.data.labels) == 1:
            raise ValueError("data.labels: name at least two labels, each once; or none, to use the labels of the data")
        if self.packing and self.task != "causal_lm":
            raise ValueError(f"packing: task {self.task} has no use for it; remove it")
        if self.samples.prompts and self.task == "image_classification":
            raise ValueError("samples.prompts: task image_classification writes nothing; remove them")
        if self.task == "text_to_image" and self.quantised is not None:
            raise ValueError("method: text_to_image trains over whole weights; use lora")
        if self.task == "text_to_image" and (self.trust_remote_code or self.revision):
            name = "trust_remote_code" if self.trust_remote_code else "revision"
            raise ValueError(f"{name}: task text_to_image has no use for it; remove it")
        if self.task in REFERENCED and self.adapters is None:
            raise ValueError(f"method: {self.task} {NEEDS_LORA}")
        return self

    @model_validator(mode="after")
    def _adapters_can_be_merged(self) -> Self:
        if self.output.merge and isinstance(self.method, FullConfig):
            raise ValueError("output.merge: method full has no adapters, its result is the whole model; remove it")
        return self

    @model_validator(mode="after")
    def _selection_can_be_made(self) -> Self:
        selection = self.selection
        if (selection.patience or selection.best) and not (self.eval_every_steps and self.data.eval_share):
            raise ValueError("selection: it needs evaluations; set eval_every_steps, and data.eval_share above 0")
        return self


DEFAULT_MAX_LOSS_S = 300.0
"""Seconds of work that may be lost if the user sets no limit."""


MAX_FREQUENCY = 5
"""Factor by which saves may be more frequent than the limit requires."""


class CheckpointConfig(Config):
    """Save interval, and number of checkpoints that are kept."""

    every_s: Annotated[Annotated[float, Field(ge=1, le=86_400)] | Literal["auto"], InSeconds] = "auto"
    """Largest time of work that may be lost, as seconds or `10m`; `auto`: 300 s. Saves are more frequent on
    machines that are often preempted if saves are cheap.
    """
    keep: Annotated[int, Field(ge=2, le=100)] = 2
    """Committed checkpoints kept for each job; at least two, so that a damaged newest checkpoint has a predecessor."""
    keep_every: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """Optimizer steps (for a script: saves). The first checkpoint at or after each multiple is kept in addition to
    the newest, for the time in `retention`. Absent: none.
    """

    @property
    def max_loss_s(self) -> float:
        """Largest number of seconds between saves."""
        return DEFAULT_MAX_LOSS_S if self.every_s == "auto" else self.every_s

    @property
    def min_interval_s(self) -> float:
        """Smallest number of seconds between saves, since traffic of each save may be charged."""
        return self.max_loss_s / MAX_FREQUENCY

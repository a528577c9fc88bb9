"""`TrainConfig`: what to fine-tune, on what, and how. The same object in a job spec and in `python -m trainer`."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from trainer.contract.base import Config, Text, shaped
from trainer.contract.guard import GuardConfig, SelectionConfig
from trainer.contract.metrics import MetricsConfig
from trainer.contract.output import OutputConfig, Secret

TaskName = Literal[
    "causal_lm",
    "text_classification",
    "text_regression",
    "token_classification",
    "seq2seq",
    "dpo",
    "reward_model",
    "image_classification",
    "text_to_image",
]
Precision = Literal["auto", "bf16", "fp16", "fp32"]
OptimizerName = Literal["adamw", "adamw_8bit", "adafactor", "sgd"]
Attention = Literal["auto", "sdpa", "flash", "eager"]
DataFormat = Literal["csv", "json", "jsonl", "parquet", "tar", "zip"]
UNPLANNED = 4
"""Rows at once where nobody planned."""

Column = Annotated[Text, Field(max_length=256)]


class DataConfig(Config):
    """Where the rows come from and how a row becomes a prompt and its completion."""

    path: Annotated[Text, Field(min_length=1, max_length=1024)]
    """A CSV, JSON, JSONL or Parquet file, several of them by a pattern or in a folder, or a .tar, .zip or folder of
    pictures: relative to the spec, or `s3://bucket/...`, `gs://bucket/...`, `hf://datasets/owner/name` with or without
    `@revision` and `/pattern`. The CLI fetches and uploads it; for the API it is `upload:<sha256>`."""
    secret: Secret | None = None
    """Name of the environment variable that may read `path`, where the spec is submitted, checked or run alone: of a
    bucket a JSON object of the store's options, such as `aws_access_key_id`; of the Hub a token (else `HF_TOKEN`)."""
    format: DataFormat | None = None
    """Taken from the file's ending when absent."""
    prompt: Annotated[Text, Field(max_length=8192)] = ""
    """Template over the columns, e.g. `Define {word}:`; it carries no loss. What `seq2seq` reads, the whole text for
    a class or a number, and the caption of a picture."""
    completion: Annotated[Text, Field(max_length=8192)] = ""
    """Template over the columns, e.g. `{definition}`; the loss is on this part only. What `seq2seq` writes."""
    chosen: Annotated[Text, Field(max_length=8192)] = ""
    """`dpo`, `reward_model`: template of the better answer to the prompt."""
    rejected: Annotated[Text, Field(max_length=8192)] = ""
    """`dpo`, `reward_model`: template of the worse one."""
    messages: Column = ""
    """`causal_lm`, in place of `prompt` and `completion`: the column of chats, lists of `{role, content}`. The model's
    own chat template renders them; the loss is on the assistant's turns only."""
    words: Column = ""
    """`token_classification`: the column of a row's words, a list, or a text with spaces between them."""
    image: Column = ""
    """`image_classification`, `text_to_image`: the column of pictures: `image` in an archive; else base64, or pixels
    from 0 to 255 as rows of columns of one number or of three."""
    label: Column = ""
    """The column of what is to be said of a row: a class (`text_classification`, `image_classification`), a number
    (`text_regression`), a tag for each word (`token_classification`). In an archive of class folders: `label`."""
    labels: Annotated[tuple[Annotated[Text, Field(min_length=1, max_length=256)], ...], Field(max_length=1000)] = ()
    """All classes; empty: those of the data. A row with another one is an error."""
    bad_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the rows that the trainer may leave out since they are unreadable, not UTF-8, or have a missing or wrong
    cell or label. More are refused. The daemon's own check takes none."""
    eval_share: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the rows held out for evaluation, chosen by the seed."""


Use = tuple[tuple[str, ...], tuple[str, ...]]
"""Settings of `data` that a task needs, and those that it may have."""
USES: dict[str, tuple[Use, ...]] = {
    "causal_lm": ((("completion",), ("prompt",)), (("messages",), ())),
    "text_classification": ((("prompt", "label"), ("labels",)),),
    "text_regression": ((("prompt", "label"), ()),),
    "token_classification": ((("words", "label"), ("labels",)),),
    "seq2seq": ((("prompt", "completion"), ()),),
    "dpo": ((("chosen", "rejected"), ("prompt",)),),
    "reward_model": ((("chosen", "rejected"), ("prompt",)),),
    "image_classification": ((("image", "label"), ("labels",)),),
    "text_to_image": ((("image", "prompt"), ()),),
}
"""The ways in which a task takes its data."""
CHOICES = ("prompt", "completion", "chosen", "rejected", "messages", "words", "image", "label", "labels")
MODEL_FILES = ("config.json", "*.safetensors", "tokenizer*")
"""What a model's folder has."""
IMAGE_MODEL_FILES = ("config.json", "*.safetensors", "preprocessor_config.json")
DIFFUSION_MODEL_FILES = (
    "model_index.json",
    *(f"{part}/*.safetensors" for part in ("unet", "vae", "text_encoder")),
    "tokenizer/*",
    "scheduler/scheduler_config.json",
)


def model_files(task: TaskName) -> tuple[str, ...]:
    """Patterns of the files that a folder with a model for the task has; the first is what says of which kind it is."""
    match task:
        case "image_classification":
            return IMAGE_MODEL_FILES
        case "text_to_image":
            return DIFFUSION_MODEL_FILES
    return MODEL_FILES


def misuse(task: TaskName, data: DataConfig) -> str | None:
    """What of `data` the task lacks or has no use for, in one line; None when they fit."""
    given = {name for name in CHOICES if getattr(data, name)}
    use = next((use for use in USES[task] if given.issuperset(use[0])), None)
    if use is None:
        needs = ", or ".join(" and ".join(f"data.{name}" for name in needed) for needed, _ in USES[task])
        return f"task {task} needs {needs}"
    needed, may = use
    extra = next((name for name in CHOICES if name in given - {*needed, *may}), None)
    return extra and f"data.{extra}: task {task} with {' and '.join(needed)} has no use for it; remove it"


PINNED = re.compile(r"[0-9a-f]{40}")
"""A revision of the Hub that cannot move: a commit."""
TARGETS = ("all-linear", "attention")
Module = Annotated[Text, Field(min_length=1, max_length=256)]
Modules = Annotated[tuple[Module, ...], Field(min_length=1, max_length=64)]


class LowRank(Config):
    """Adapters beside the linear modules of a frozen base."""

    r: Annotated[int, Field(ge=1, le=1024)] = 16
    alpha: Annotated[int, Field(ge=1, le=4096)] = 32
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    targets: Literal["all-linear", "attention"] | Modules = "all-linear"
    """What gets an adapter: every linear module but the head, those of attention, or the modules that end in one of the
    names of a list, such as `[q_proj, v_proj]`."""
    rslora: bool = False
    """Scale by alpha over the square root of r, not over r (arXiv 2312.03732): for large ranks."""
    dora: bool = False
    """Learn the magnitude of each weight's rows besides (arXiv 2402.09353). Slower; its memory is not estimated."""

    @field_validator("targets", mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        """A list of one word means the word; a list is the tuple of it, also where nothing is converted."""
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
    """Of a weight of the base's linear modules: 4 (NF4 in blocks of 64, its scales quantised again), or 8 (LLM.int8,
    arXiv 2208.07339). Head, norms and embeddings stay as they are."""

    @model_validator(mode="after")
    def _dora_over_four(self) -> Self:
        if self.dora and self.bits == 8:
            raise ValueError("dora: peft cannot do it over a base of 8 bits; use bits: 4, or leave it out")
        return self


class FullConfig(Config):
    """Every weight is trained."""

    kind: Literal["full"] = "full"


Method = Annotated[LoraConfig | QloraConfig | FullConfig, Field(discriminator="kind")]


class OptimConfig(Config):
    """The optimizer, with linear warm-up and cosine decay to zero."""

    name: OptimizerName = "adamw"
    """`adamw_8bit` keeps AdamW's moments in a byte each (arXiv 2110.02861), `adafactor` sums of rows and columns in
    their place (arXiv 1804.04235; its `lr` is relative to the size of the weights, 1e-3 to 1e-2), `sgd` nothing."""
    lr: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = "auto"
    """The highest, after the warm-up. `auto`: a published one for the task, the method and the model's size, kept
    through every resume."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    warmup_share: Annotated[float, Field(ge=0, lt=1)] = 0.1
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    beta1: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Of AdamW, as `beta2`; the others have none."""
    beta2: Annotated[float, Field(gt=0, lt=1)] = 0.999

    @model_validator(mode="after")
    def _rate_known(self) -> Self:
        if self.lr == "auto" and self.name == "sgd":
            raise ValueError("lr: no rate of sgd was published that goes for other models; give a number")
        return self


class DpoConfig(Config):
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290)."""

    beta: Annotated[float, Field(gt=0, le=100)] = 0.1
    """How closely the model is held to the one that it began as."""


class DiffusionConfig(Config):
    """`text_to_image`: Stable Diffusion 1.x, 2.x and SDXL."""

    resolution: Annotated[int, Field(ge=16, le=2048, multiple_of=8)] | None = None
    """Pixels of a side, to which pictures are resized and cropped in the middle; absent: the model's own."""
    min_snr: Annotated[float, Field(gt=0, le=100)] | None = None
    """The gamma of Min-SNR weighting (Hang et al. 2023, arXiv 2303.09556), 5 in the paper; absent: all alike."""
    cache: bool = True
    """Keep what the frozen parts make of each row in the host's memory of each process: about 0.4 MB a row for Stable
    Diffusion at 512 pixels, 1.2 MB for SDXL at 1024. The losses are the same without."""
    sample_steps: Annotated[int, Field(ge=1, le=1000)] = 30
    """Denoising steps of a sample."""


class SamplesConfig(Config):
    """Texts that the tuned model writes at the end, beside the base model's (greedy decoding); pictures that it makes
    (`text_to_image`).
    """

    prompts: Annotated[tuple[Annotated[Text, Field(max_length=4096)], ...], Field(max_length=16)] = ()
    max_new_tokens: Annotated[int, Field(ge=1, le=1024)] = 48


class TrainConfig(Config):
    """A fine-tune."""

    task: TaskName = "causal_lm"
    model: Annotated[Text, Field(min_length=1, max_length=1024)]
    """A Hub id (`owner/name`) or a local folder with config.json, safetensors and tokenizer files."""
    revision: (
        Annotated[str, shaped(r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$", "must be a branch, a tag or a commit")] | None
    ) = None
    """Branch, tag or commit of the model on the Hub; absent: `main`."""
    trust_remote_code: bool = False
    """Run the code that the model brings (`auto_map` of its config.json), where the job's secrets are. Of a Hub id
    `revision` must be a commit. Refused unless the daemon's `trainer.remote_code` lists the model; a run alone needs
    `--trust-remote-code` besides."""
    data: DataConfig
    method: Method = LoraConfig()
    optim: OptimConfig = OptimConfig()
    dpo: DpoConfig = DpoConfig()
    diffusion: DiffusionConfig = DiffusionConfig()
    epochs: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Ignored when `max_steps` is given."""
    max_steps: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Optimizer steps."""
    global_batch: Annotated[int, Field(ge=1, le=65536)] | Literal["auto"] = 8
    """Rows per optimizer step over all devices; kept constant when the number of devices changes. `auto`: a published
    number for the task, the method and the rows, settled when the job is submitted."""
    micro_batch: Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] = "auto"
    """Rows per forward pass of a device; must divide `global_batch`. `auto`: as the plan of the machine has it; up to 4
    where there is no plan."""
    max_length: Annotated[int, Field(ge=8, le=1_048_576)] = 512
    """Tokens of a row; longer rows are cut at the end."""
    packing: bool = False
    """`causal_lm`: lay the rows of a step end to end in sequences of up to `max_length` tokens, each row seeing only
    itself, in place of padding; `micro_batch` then counts sequences. The loss is that of the rows apart."""
    precision: Precision = "auto"
    """`auto`: bf16 where the device has it, else fp32."""
    tf32: bool = False
    """Multiply float32 matrices in TF32 where the GPU has it: faster, with ten bits of mantissa."""
    fp8: bool = False
    """Method `full`: multiply in 8 bits in the layers where the GPU has it (Ada, Hopper and later), by torchao. Pays
    with `compile` and large layers. Not where FSDP or tensor parallelism divides the weights."""
    compile: bool = False
    """Compile each layer (torch.compile): faster steps, after a first one that takes minutes."""
    attention: Attention = "auto"
    """`sdpa`: torch's fused kernels; `flash`: the flash-attn package, if the machine has it; `eager`: the model's own
    code, which keeps every score. `auto`: as the model has it, which is sdpa for nearly all."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Compute activations again instead of keeping them. `auto`: as the plan has it; no where there is none."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 17
    eval_every_steps: Annotated[int, Field(ge=1)] | None = None
    """Held-out loss is always measured before the first and after the last step."""
    guard: GuardConfig = GuardConfig()
    selection: SelectionConfig = SelectionConfig()
    samples: SamplesConfig = SamplesConfig()
    output: OutputConfig = OutputConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def rows_at_once(self) -> int:
        """The micro-batch; `auto`: the largest divisor of the global batch up to 4."""
        if self.micro_batch != "auto":
            return self.micro_batch
        return next(rows for rows in range(UNPLANNED, 0, -1) if self.rows_a_step % rows == 0)

    @property
    def rows_a_step(self) -> int:
        """The global batch. Raises ValueError while it is `auto`: `batches.settled` knows the number."""
        if self.global_batch == "auto":
            raise ValueError("global_batch: auto is not settled yet")
        return self.global_batch

    @property
    def adapters(self) -> LowRank | None:
        """None: every weight is trained."""
        return self.method if isinstance(self.method, LowRank) else None

    @property
    def quantised(self) -> QloraConfig | None:
        """None: the base is not quantised."""
        return self.method if isinstance(self.method, QloraConfig) else None

    @property
    def recomputes(self) -> bool:
        """Whether activations are computed again."""
        return self.gradient_checkpointing is True

    @model_validator(mode="after")
    def _batches_divide(self) -> Self:
        settled = self.micro_batch != "auto" and self.global_batch != "auto"
        if settled and self.rows_a_step % self.rows_at_once:
            raise ValueError(f"micro_batch {self.micro_batch} does not divide global_batch {self.global_batch}")
        return self

    @model_validator(mode="after")
    def _task_and_data_fit(self) -> Self:
        if wrong := misuse(self.task, self.data):
            raise ValueError(wrong)
        if len(set(self.data.labels)) < len(self.data.labels) or len(self.data.labels) == 1:
            raise ValueError("data.labels: name two at least, each of them once; or none, for those of the data")
        if self.packing and self.task != "causal_lm":
            raise ValueError(f"packing: task {self.task} has no use for it; remove it")
        if self.samples.prompts and self.task == "image_classification":
            raise ValueError("samples.prompts: task image_classification writes nothing; remove them")
        if self.task == "text_to_image" and self.quantised is not None:
            raise ValueError("method: text_to_image trains over whole weights; use lora")
        if self.task == "text_to_image" and (self.trust_remote_code or self.revision):
            name = "trust_remote_code" if self.trust_remote_code else "revision"
            raise ValueError(f"{name}: task text_to_image has no use for it; remove it")
        if self.task == "dpo" and self.adapters is None:
            raise ValueError("method: dpo trains a LoRA, since the model under its adapters is the reference; use lora")
        return self

    @model_validator(mode="after")
    def _adapters_can_be_merged(self) -> Self:
        if self.output.merge and isinstance(self.method, FullConfig):
            raise ValueError("output.merge: method full has no adapters, its result is the whole model; remove it")
        return self

    @model_validator(mode="after")
    def _selection_can_be_made(self) -> Self:
        chosen = self.selection
        if (chosen.patience or chosen.best) and not (self.eval_every_steps and self.data.eval_share):
            raise ValueError("selection: it goes by evaluations; set eval_every_steps, and data.eval_share above 0")
        return self


AUTO_MOST_S = 300.0
"""Seconds of work that may be lost where nobody said how much."""


OFTENER = 5
"""How many times sooner than that saves may come."""


class CheckpointConfig(Config):
    """When progress is made safe, and how much of it is kept."""

    every_s: Annotated[float, Field(ge=1, le=86_400)] | Literal["auto"] = "auto"
    """Seconds of work that may be lost, at the most; `auto`: 300. Saves come sooner where machines are often taken away
    and saves cost little."""
    keep: Annotated[int, Field(ge=2, le=100)] = 2
    """Committed checkpoints kept for each job; two at least, so that a torn newest one has a successor."""
    keep_every: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """Optimizer steps (of a script: saves); the first checkpoint at or after each multiple stays besides the newest, as
    long as `retention` says. Absent: none."""

    @property
    def most_s(self) -> float:
        """Seconds between saves, at the most."""
        return AUTO_MOST_S if self.every_s == "auto" else self.every_s

    @property
    def least_s(self) -> float:
        """Seconds between saves, at the least: each is paid for where traffic is."""
        return self.most_s / OFTENER

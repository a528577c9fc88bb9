"""`DataConfig`: the dataset of a training job, and the columns that each task reads."""

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from trainer.contract.base import Config, Text
from trainer.contract.output import Secret

TaskName = Literal[
    "causal_lm",
    "text_classification",
    "text_regression",
    "token_classification",
    "seq2seq",
    "dpo",
    "orpo",
    "kto",
    "reward_model",
    "image_classification",
    "text_to_image",
]


DataFormat = Literal["csv", "json", "jsonl", "parquet", "tar", "zip"]


WHOLE = re.compile(r"([+-]?\d+)\.0+")


def class_name(value: Any) -> Any:
    """Return a class as text: `1`, `1.0` and `"1"` are one class. A value that is not a class is returned as it is."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return value
    text = str(value).strip()
    match = WHOLE.fullmatch(text)
    return match[1] if match else text


Label = Annotated[Text, BeforeValidator(class_name), Field(min_length=1, max_length=256)]
Column = Annotated[Text, Field(max_length=256)]


class DataConfig(Config):
    """Source of the rows, and templates that turn a row into a prompt and its completion."""

    path: Annotated[Text, Field(min_length=1, max_length=1024)]
    """A CSV, JSON, JSONL or Parquet file, several of them by a pattern or in a folder, or a .tar, .zip or folder of
    pictures. Paths are relative to the spec. URLs are `s3://bucket/...`, `gs://bucket/...` and
    `hf://datasets/owner/name`, the last with optional `@revision` and `/pattern`. The CLI fetches and uploads the
    data; the API takes `upload:<sha256>`.
    """
    secret: Secret | None = None
    """Name of the environment variable with credentials to read `path`, on the machine that submits, checks or
    trains without a broker. For a bucket: a JSON object of the store's options, such as `aws_access_key_id`. For
    the Hub: a token (default: `HF_TOKEN`).
    """
    format: DataFormat | None = None
    """Absent: derived from the file's ending."""
    prompt: Annotated[Text, Field(max_length=8192)] = ""
    """Template over the columns, e.g. `Define {word}:`; it carries no loss. `seq2seq` reads it; for a class or a
    number it is the whole text, for a picture the caption.
    """
    completion: Annotated[Text, Field(max_length=8192)] = ""
    """Template over the columns, e.g. `{definition}`; only this part carries loss. `seq2seq` writes it, `kto`
    rates it.
    """
    chosen: Annotated[Text, Field(max_length=8192)] = ""
    """`dpo`, `orpo`, `reward_model`: template of the better answer to the prompt."""
    rejected: Annotated[Text, Field(max_length=8192)] = ""
    """`dpo`, `orpo`, `reward_model`: template of the worse answer."""
    messages: Column = ""
    """`causal_lm`, in place of `prompt` and `completion`: the column of chats, lists of `{role, content}`. The
    model's own chat template renders them; only the assistant's turns carry loss. The template also gets the row's
    columns `tools`, `documents` and `chat_template_kwargs`, and `system` as first message. A message with `weight: 0`
    or `train: false` has no loss.
    """
    learn: Literal["all", "last", "split"] = "all"
    """Answers of a chat that carry loss: all, or the last one. `split` makes an example of each answer, which then
    has the form in which the model gives it, e.g. with its reasoning.
    """
    words: Column = ""
    """`token_classification`: the column with a row's words, as a list or as a text with spaces between them."""
    image: Column = ""
    """`image_classification`, `text_to_image`: the column of pictures. In an archive it is `image`. Otherwise cells
    hold base64, or pixels from 0 to 255 as rows of columns of one number or of three.
    """
    label: Column = ""
    """The column to predict: a class (`text_classification`, `image_classification`), a number (`text_regression`)
    or a tag for each word (`token_classification`). In an archive of class folders: `label`. `kto`: the column that is
    true for a good answer and false for a bad one.
    """
    labels: Annotated[tuple[Label, ...], Field(max_length=1000)] = ()
    """All classes; empty: the classes in the data, in the order of the model's own head if it has the same ones. Whole
    numbers in the data are indices into these names, unless a name is a number. A row with another class is an error.
    """
    bad_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Largest share of bad rows that the trainer leaves out: unreadable, not UTF-8, or a missing or wrong cell or
    label. A larger share is refused. The daemon's own check accepts no bad row.
    """
    eval_share: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the rows held out for evaluation, chosen by the seed; by `learn: split`, of the chats."""


Use = tuple[tuple[str, ...], tuple[str, ...]]
"""Names of `data` settings that a task requires, then those that are optional."""
USES: dict[str, tuple[Use, ...]] = {
    "causal_lm": ((("completion",), ("prompt",)), (("messages",), ())),
    "text_classification": ((("prompt", "label"), ("labels",)),),
    "text_regression": ((("prompt", "label"), ()),),
    "token_classification": ((("words", "label"), ("labels",)),),
    "seq2seq": ((("prompt", "completion"), ()),),
    "dpo": ((("chosen", "rejected"), ("prompt",)),),
    "orpo": ((("chosen", "rejected"), ("prompt",)),),
    "kto": ((("completion", "label"), ("prompt",)),),
    "reward_model": ((("chosen", "rejected"), ("prompt",)),),
    "image_classification": ((("image", "label"), ("labels",)),),
    "text_to_image": ((("image", "prompt"), ()),),
}
"""Alternative sets of `data` settings by task; the first whose required settings are given applies."""
COLUMN_SETTINGS = ("prompt", "completion", "chosen", "rejected", "messages", "words", "image", "label", "labels")
MODEL_FILES = ("config.json", "*.safetensors", "tokenizer*")
"""Files in the folder of a language model."""
IMAGE_MODEL_FILES = ("config.json", "*.safetensors", "preprocessor_config.json")
DIFFUSION_MODEL_FILES = (
    "model_index.json",
    *(f"{part}/*.safetensors" for part in ("unet", "vae", "text_encoder")),
    "tokenizer/*",
    "scheduler/scheduler_config.json",
)


def model_files(task: TaskName) -> tuple[str, ...]:
    """Return patterns of the files in a model folder for the task; the first identifies the model's kind."""
    match task:
        case "image_classification":
            return IMAGE_MODEL_FILES
        case "text_to_image":
            return DIFFUSION_MODEL_FILES
    return MODEL_FILES


def data_misuse_message(task: TaskName, data: DataConfig) -> str | None:
    """Return one line on `data` settings that are missing or that the task does not use; None if there are none."""
    columns = {name for name in COLUMN_SETTINGS if getattr(data, name)}
    use = next((use for use in USES[task] if columns.issuperset(use[0])), None)
    if use is None:
        choices = ", or ".join(" and ".join(f"data.{name}" for name in needed) for needed, _ in USES[task])
        return f"task {task} needs {choices}"
    if data.learn != "all" and not data.messages:
        return "data.learn: only chats have several answers; remove it, or give data.messages"
    needed, may = use
    extra = next((name for name in COLUMN_SETTINGS if name in columns - {*needed, *may}), None)
    return extra and f"data.{extra}: task {task} with {' and '.join(needed)} has no use for it; remove it"

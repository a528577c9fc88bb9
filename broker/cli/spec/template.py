"""The specs that `gpubroker init` writes: a short one, and every setting with the description from its model."""

import json
import textwrap
from pathlib import Path as FilePath
from typing import Any, Literal

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from broker.cli.spec import schema
from broker.cli.spec.allowed_values import allowed_values

Kind = Literal["train", "script"]
Path = tuple[str, ...]

VALUES: dict[Path, Any] = {
    ("name",): "my-job",
    ("train", "model"): "HuggingFaceTB/SmolLM2-135M-Instruct",
    ("train", "data", "path"): "data.csv",
    ("train", "data", "prompt"): "Question: {question}\nAnswer:",
    ("train", "data", "completion"): " {answer}",
    ("train", "epochs"): 1,
    ("train", "global_batch"): 8,
    ("train", "method", "kind"): "lora",
    ("train", "method", "r"): 16,
    ("script", "code"): "./code",
    ("script", "command"): ["python", "train.py"],
}
"""Settings that are written with these values; all others are written as comments with their defaults."""
CAP = 10
"""Example cap in dollars. `cap_usd` is the only optional setting without a default, because `submit` proposes a cap."""
WIDTH = 110


SHORT_TEMPLATES: dict[Kind, str] = {
    "train": """\
name: my-job
# cap_usd: 10  # dollars that the job never exceeds; without it `gpubroker submit` proposes a cap
train:
  model: HuggingFaceTB/SmolLM2-135M-Instruct
  data:
    path: data.csv  # or JSONL, Parquet, hf://datasets/owner/name
    prompt: "Question: {question}\\nAnswer:"  # {column} is a column of the data
    completion: " {answer}"
  method: {kind: lora, r: 16}  # kind: lora, qlora, full
  epochs: 1
resources:
  accelerators: []  # such as [H100, L40S]; empty: any
  spot: allowed  # allowed, never, only
""",
    "script": """\
name: my-job
cap_usd: 10  # dollars that the job never exceeds
script:
  code: ./code  # the folder is sent to the machine
  command: [python, train.py]
  checkpoints: true  # it saves to $GPUBROKER_CHECKPOINT_DIR and resumes from there
env: {}
secrets: []  # names of `gpubroker secret set NAME`
resources:
  gpus: 1  # 1 to 64, or auto
  accelerators: []  # such as [H100, L40S]; empty: any
  spot: allowed  # allowed, never, only
""",
}


def short_spec(kind: Kind, schema_file: FilePath | None = None) -> str:
    """Return a YAML text of at most 15 lines. `schema_file`: JSON Schema by which an editor checks the text."""
    head = "# A gpubroker job; `gpubroker init --full` writes every setting.\n"
    return _editor_line(schema_file) + head + SHORT_TEMPLATES[kind]


def full_spec(kind: Kind, schema_file: FilePath | None = None) -> str:
    """Return a YAML text with every setting, which parses and validates unchanged."""
    head = [
        "# A gpubroker job. Check it with `gpubroker quote FILE`, run it with `gpubroker submit FILE`.",
        "# A setting after `#` has its default value.",
    ]
    other: Path = ("script",) if kind == "train" else ("train",)
    return _editor_line(schema_file) + "\n".join([*head, *_group((), skip=other)]) + "\n"


def _editor_line(schema_file: FilePath | None) -> str:
    return f"# yaml-language-server: $schema={schema_file.as_uri()}\n" if schema_file else ""


def _group(above: Path, skip: Path, *, commented: bool = False) -> list[str]:
    lines: list[str] = []
    indent = "  " * len(above)
    for name, field in _fields(above).items():
        path = (*above, name)
        if path == skip:
            continue
        if not above:
            lines.append("")
        lines += _comment(path, indent)
        if schema.models(path):
            inside = any(key[: len(path)] == path for key in VALUES)
            mark = "" if inside and not commented else "# "
            lines.append(f"{indent}{mark}{name}:")
            lines += _group(path, skip, commented=commented or not inside)
        else:
            lines.append(_setting(path, field, indent, commented=commented))
    return lines


def _fields(above: Path) -> dict[str, FieldInfo]:
    """Return the fields below `above`; for a choice between kinds, those of the first kind."""
    models = schema.models(above)
    return dict(models[0].model_fields) if models else {}


def _comment(path: Path, indent: str) -> list[str]:
    values = allowed_values(path)
    text = " ".join(schema.description(path).split())
    if any(character.isdigit() or character == "`" for character in values) and values != "`true`, `false`":
        text = f"{text} Must be {'one of' if values.startswith('`') else 'a'} {values}.".lstrip()
    return [f"{indent}# {line}" for line in textwrap.wrap(text, WIDTH - len(indent))]


def _setting(path: Path, field: FieldInfo, indent: str, *, commented: bool) -> str:
    name = path[-1]
    if path in VALUES and not commented:
        return f"{indent}{name}: {_yaml(VALUES[path])}"
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        default = (field.examples or [CAP])[0]
    return f"{indent}# {name}: {_yaml(default)}"


def _yaml(value: Any) -> str:
    """Return a value on one line, as JSON, which is valid YAML."""
    if isinstance(value, str) and value.replace("-", "").replace("/", "").replace(".", "").isalnum():
        return value
    return json.dumps(value, ensure_ascii=False, default=str)

"""The spec that `gpubroker init` writes: every setting with the description from its pydantic model."""

import json
import textwrap
from typing import Any, Literal

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from broker.cli.spec import schema

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


def spec(kind: Kind) -> str:
    """Return a YAML text that parses and validates unchanged."""
    head = [
        "# A gpubroker job. Check it with `gpubroker quote FILE`, run it with `gpubroker submit FILE`.",
        "# A setting after `#` has its default value.",
    ]
    other: Path = ("script",) if kind == "train" else ("train",)
    return "\n".join([*head, *_group((), skip=other)]) + "\n"


def _group(above: Path, skip: Path, *, off: bool = False) -> list[str]:
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
            mark = "" if inside and not off else "# "
            lines.append(f"{indent}{mark}{name}:")
            lines += _group(path, skip, off=off or not inside)
        else:
            lines.append(_setting(path, field, indent, off=off))
    return lines


def _fields(above: Path) -> dict[str, FieldInfo]:
    """Return the fields below `above`; for a choice between kinds, those of the first kind."""
    models = schema.models(above)
    return dict(models[0].model_fields) if models else {}


def _comment(path: Path, indent: str) -> list[str]:
    text = " ".join(schema.description(path).split())
    return [f"{indent}# {line}" for line in textwrap.wrap(text, WIDTH - len(indent))]


def _setting(path: Path, field: FieldInfo, indent: str, *, off: bool) -> str:
    name = path[-1]
    if path in VALUES and not off:
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

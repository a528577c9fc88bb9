"""Fields of the form for a new job, as a spec and back. Pure functions: the spec's own rules check the values."""

import copy
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import yaml

from broker.domain.errors import InvalidInput, Problem
from trainer.contract import yaml_document
from trainer.contract.data_config import COLUMN_SETTINGS, USES
from trainer.contract.script import line_words

NUMBER = re.compile(r"-?\d+(\.\d+)?([eE]-?\d+)?")
MORE = "more"
"""Field with further settings as YAML, which win over the other fields."""
MORE_BYTES = 32 * 1024
"""Maximum bytes of that field: the time of the YAML parser grows with them."""
NUMBER_CHARS = 40
"""Longest text that is read as a number. The spec's rules refuse a longer one."""


@dataclass(frozen=True, kw_only=True)
class FormField:
    """One field of the form and its place in the spec."""

    name: str
    path: str
    default: str = ""


FIELDS: tuple[FormField, ...] = (
    FormField(name="name", path="name"),
    FormField(name="cap_usd", path="cap_usd"),
    FormField(name="deadline", path="deadline"),
    FormField(name="task", path="train.task", default="causal_lm"),
    FormField(name="model", path="train.model"),
    *(FormField(name=setting, path=f"train.data.{setting}") for setting in COLUMN_SETTINGS if setting != "labels"),
    FormField(name="method", path="train.method.name", default="lora"),
    FormField(name="epochs", path="train.epochs", default="1"),
    FormField(name="max_steps", path="train.max_steps"),
    FormField(name="global_batch", path="train.global_batch", default="8"),
    FormField(name="max_length", path="train.max_length", default="512"),
    FormField(name="lr", path="train.optim.lr"),
    FormField(name="gpus", path="resources.gpus", default="auto"),
    FormField(name="spot", path="resources.spot", default="allowed"),
    FormField(name="objective", path="resources.objective", default="cheapest"),
    FormField(name="accelerators", path="resources.accelerators"),
    FormField(name="cpus", path="resources.cpus"),
    FormField(name="memory_gb", path="resources.memory_gb"),
    FormField(name="disk_gb", path="resources.disk_gb"),
    FormField(name="command", path="script.command"),
    FormField(name="requirements", path="script.requirements"),
    FormField(name="setup", path="script.setup"),
    FormField(name="image", path="script.image"),
)
SCRIPT = "script"
"""Choice of the field `task` for a job that runs a program instead of the trainer."""
LISTS = frozenset({"accelerators", "command", "setup"})
"""Fields whose values are lists of texts: parted by commas, the words of a line, the lines."""
TEMPLATES = frozenset(("prompt", "completion", "chosen", "rejected"))
"""Fields whose spaces at both ends count: prompt and completion are one text."""
TEXTS = frozenset({"name", "cap_usd", "deadline", "model", "requirements", "image", *COLUMN_SETTINGS})
"""Fields whose values stay texts, also where they look like numbers."""
PAIRS = (
    ("prompt", "completion"), ("instruction", "output"), ("instruction", "response"), ("question", "answer"),
    ("input", "output"), ("source", "target"), ("text", "summary"), ("document", "summary"),
)  # fmt: skip
"""Usual names of the columns of a prompt and its completion."""


def field_of(path: str) -> str:
    """Return the form's field for a path of the spec; the path itself if the form has none."""
    names = {field.path: field.name for field in FIELDS} | {
        "train.data.path": "upload", "train.method": "method", "script.code": "upload"
    }  # fmt: skip
    while path:
        if path in names:
            return names[path]
        path = path.rpartition(".")[0]
    return ""


def fields_of(task: str) -> tuple[FormField, ...]:
    """Return the fields that the form has for a task."""
    other = "train." if task == SCRIPT else "script."
    return tuple(field for field in FIELDS if field.name == "task" or not field.path.startswith(other))


def document(form: Mapping[str, str], upload: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec that the form describes, with `more` on top. Fields with their default are left out.

    `upload`: what `train.data.path`, or `script.code` of a script, shall be.
    """
    spec: dict[str, Any] = {}
    task = form.get("task", "")
    for field in fields_of(task):
        if task == SCRIPT and field.name == "task":
            continue
        written = form.get(field.name, "")
        text = written if field.name in TEMPLATES and written.strip() else written.strip()
        if text and (text != field.default or field.name == "task"):
            _set_at(spec, field.path.split("."), _value(field.name, text))
    if upload:
        _set_at(spec, _upload_path(task), upload)
    return _merged(spec, more)


def _upload_path(task: str) -> list[str]:
    return ["script", "code"] if task == SCRIPT else ["train", "data", "path"]


def _value(name: str, text: str) -> Any:
    if name == "accelerators":
        return [part.strip() for part in text.split(",") if part.strip()]
    if name == "setup":
        return [line.strip() for line in text.splitlines() if line.strip()]
    if name == "command":
        return line_words(text) or text
    if name in TEXTS or len(text) > NUMBER_CHARS or not NUMBER.fullmatch(text):
        return text
    return float(text) if set(text) & set(".eE") else int(text)


def further_settings(form: Mapping[str, str]) -> Mapping[str, Any]:
    """Parse the field MORE; takes up to a second of CPU. Raises InvalidInput."""
    return yaml_settings(form.get(MORE, ""), MORE)


def yaml_settings(text: str, field: str) -> Mapping[str, Any]:
    """Parse a field with settings as YAML; takes up to a second of CPU. Raises InvalidInput for that field."""
    if (size := len(text.encode())) > MORE_BYTES:
        message = f"has {size:,} bytes; give at most {MORE_BYTES:,}, or use the command line"
        raise InvalidInput(Problem(field=field, message=message))
    try:
        data = yaml_document.parse(text, "line").data if text.strip() else {}
    except yaml_document.BadYaml as error:
        raise InvalidInput(Problem(field=field, message=str(error))) from None
    if not isinstance(data, Mapping):
        raise InvalidInput(Problem(field=field, message="must be settings such as `priority: 5`; correct it"))
    try:
        json.dumps(data, ensure_ascii=False, skipkeys=True, default=str).encode()
    except (UnicodeEncodeError, RecursionError):
        message = "has half of a character, such as \\ud800, or is nested too deep; correct it"
        raise InvalidInput(Problem(field=field, message=message)) from None
    return data


def _set_at(spec: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *folders, last = path
    for folder in folders:
        spec = spec.setdefault(folder, {})
    spec[last] = value


def _merged(spec: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec with `more` on top, mapping by mapping."""
    for key, value in more.items():
        inner = spec.get(key)
        spec[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else value
    return spec


def as_yaml(spec: Mapping[str, Any]) -> str:
    """Return the spec as YAML; empty if it is nested too deep to be written."""
    try:
        return yaml.safe_dump(dict(spec), sort_keys=False, allow_unicode=True, width=100)
    except RecursionError:
        return ""


def form_of(spec: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return (the form's fields, the further settings) of a spec without the path of its data or code."""
    rest: dict[str, Any] = copy.deepcopy(dict(spec))
    form: dict[str, str] = {"task": SCRIPT} if isinstance(rest.get("script"), dict) else {}
    _take(rest, _upload_path(form.get("task", "")))
    for field in fields_of(form.get("task", "")):
        folders = field.path.split(".")
        value = _take(rest, folders)
        text = _text(field.name, value)
        if isinstance(value, Mapping) or (value is not None and not _survives(field.name, text, value)):
            _set_at(rest, folders, value)
        elif value is not None:
            form[field.name] = text
    return form, rest


def _text(name: str, value: Any) -> str:
    """Return the text of a field that `_value` may read as `value`."""
    if name not in LISTS or not isinstance(value, list):
        return str(value)
    texts = [str(item) for item in value]
    return shlex.join(texts) if name == "command" else ("\n" if name == "setup" else ", ").join(texts)


def _survives(name: str, text: str, value: Any) -> bool:
    """Return whether an input of one line sends `text` unchanged, and `document` reads `value` from it again.

    Browsers remove line breaks from such an input, and `document` strips all fields except TEMPLATES.
    """
    if name in LISTS and name != "accelerators":
        return isinstance(value, list) and (_value(name, text) == value or not value)
    if "\r" in text or "\n" in text:
        return False
    return not isinstance(value, str) or (bool(text.strip()) and (name in TEMPLATES or text == text.strip()))


def _take(spec: dict[str, Any], path: Sequence[str]) -> Any:
    """Remove and return a setting; None: it is not set. Mappings that become empty are removed too."""
    head, *rest = path
    if not rest:
        return spec.pop(head, None)
    inner = spec.get(head)
    if not isinstance(inner, dict):
        return None
    value = _take(inner, rest)
    if not inner:
        del spec[head]
    return value


def cap_text(cap: Decimal) -> str:
    """Return every digit of a cap, with two decimals unless it is whole dollars. Equal caps give equal texts."""
    text = f"{cap.normalize():f}"
    dollars, _, cents = text.partition(".")
    return f"{dollars}.{cents:0<2}" if cents else dollars


def suggested(task: str, columns: Sequence[str]) -> dict[str, str]:
    """Return the mapping of columns to the task's settings that their names suggest; empty without columns."""
    lower = {column.lower(): column for column in columns}
    if not columns:
        return {}
    if task == "causal_lm" and (chat := lower.get("messages") or lower.get("conversations")):
        return {"messages": chat}
    needed, more = USES.get(task, USES["causal_lm"])[0]
    pair = next(((a, b) for a, b in PAIRS if a in lower and b in lower), None)
    first, last = (lower[pair[0]], lower[pair[1]]) if pair else (columns[0], columns[-1])
    text = lower.get("text", first)
    guess = {
        "prompt": f"{{{text if 'label' in needed else lower.get('prompt', first)}}}",
        "completion": f"{{{last}}}",
        "chosen": f"{{{lower.get('chosen', first)}}}",
        "rejected": f"{{{lower.get('rejected', last)}}}",
        "words": lower.get("tokens", lower.get("words", first)),
        "image": lower.get("image", first),
        "label": lower.get("label", lower.get("labels", last)),
    }
    column_names = [*needed, *(name for name in more if name in guess and len(columns) > len(needed))]
    mapping = {name: guess[name] for name in column_names if name in guess}
    if task == "causal_lm" and "prompt" in mapping:
        mapping["completion"] = f" {mapping['completion']}"  # one text with the prompt
    return mapping

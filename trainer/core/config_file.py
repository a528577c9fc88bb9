"""Read the configuration of a standalone run: a TrainConfig, or the job specification that holds one."""

import json
import os
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from trainer.contract import yaml_document
from trainer.contract.base import Config
from trainer.contract.train import CheckpointConfig, TrainConfig
from trainer.contract.validation_messages import error_messages

C = TypeVar("C", bound=Config)


MODEL_MARKS = ("config.json", "model_index.json")
"""Files of which a model folder has at least one."""


class BadConfig(ValueError):
    """The configuration cannot be used; the message names the place and the fix."""


def read_config(path: Path) -> TrainConfig:
    """Return a TrainConfig, or the `train` part of a job's spec.

    The path of a model folder is relative to the file's folder, as paths of data are.

    Raises: BadConfig naming the key.
    """
    train = _valid(TrainConfig, _read_parts(path)[0])
    folder = path.parent / os.path.expanduser(train.model)
    try:
        is_model_folder = any((folder / name).is_file() for name in MODEL_MARKS)
    except OSError:  # such as a name that is too long for a file
        is_model_folder = False
    return train.model_copy(update={"model": str(folder.resolve())}) if is_model_folder else train


def read_saving(path: Path, save_every_s: float | None) -> CheckpointConfig:
    """Return the `checkpoint` part of a job's spec, or the default.

    `save_every_s` replaces the part's `every_s`.

    Raises: BadConfig naming the key.
    """
    saving = _valid(CheckpointConfig, _read_parts(path)[1], "checkpoint")
    if save_every_s is None:
        return saving
    changed = {**saving.model_dump(), "every_s": save_every_s}
    try:
        return CheckpointConfig.model_validate(changed)
    except ValidationError as e:
        raise BadConfig(f"--save-every: {first_problem(e, CheckpointConfig, changed)[1]}") from None


def _read_parts(path: Path) -> tuple[Any, Any]:
    """Return the training and checkpoint parts as written. Raises: BadConfig."""
    try:
        document = yaml_document.parse(path.read_text("utf-8-sig"), str(path)).data
    except yaml_document.BadYaml as e:
        raise BadConfig(f"line {e.line}: {e.message}") from None
    except OSError as e:
        raise BadConfig(f"cannot be read ({e.strerror}); name a job's spec or a TrainConfig") from None
    except UnicodeDecodeError as e:
        raise BadConfig(f"byte {e.start} is not UTF-8; save the file as UTF-8") from None
    if "model" in document or not ("train" in document or "script" in document):
        return document, {}
    if document.get("train") is None:
        raise BadConfig("train: the spec has none; a script's data and model are not known")
    return document["train"], document.get("checkpoint", {})


def _valid(kind: type[C], document: Any, *place: str) -> C:
    """Validate strictly, as the HTTP API does: no value is converted. Raises: BadConfig naming the key."""
    try:
        return kind.model_validate_json(json.dumps(document), strict=True)
    except ValidationError as e:
        within, message = first_problem(e, kind, document)
        raise BadConfig(": ".join(filter(None, (".".join(filter(None, (*place, within))), message)))) from None


def first_problem(error: ValidationError, kind: type[BaseModel], document: Any) -> tuple[str, str]:
    """Return (place, message) of the first problem."""
    return next(iter(error_messages(error, kind, document).items()))

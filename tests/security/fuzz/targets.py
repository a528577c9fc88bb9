"""Functions of the product that parse untrusted files, each with the errors that it may raise."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from broker.domain.errors import InvalidInput
from broker.domain.spec import JobSpec
from broker.model_catalog.task_shape import task_shape
from broker.preflight import model_lookup
from broker.preflight.parse_worker import examine
from broker.sizing.estimate import TASKS
from tests.security.fuzz.seeds import archive, seeds
from trainer.contract import yaml_document
from trainer.contract.data_config import DataFormat
from trainer.contract.documents import Final, Heartbeat


@dataclass(frozen=True, kw_only=True)
class Target:
    """One parser. `run` takes the bytes of a file."""

    run: Callable[[bytes], object]
    refusals: tuple[type[BaseException], ...]
    """Errors that refuse bad input. Any other exception counts as a crash."""
    on_loop: bool = False
    """True if the daemon calls it on its event loop."""
    limits_s: float = 10.0
    """CPU seconds after which the daemon ends the parser; a parser on the loop has none, see `STALL_S`."""


def _upload(fmt: DataFormat, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(prefix="fuzz-", dir="/dev/shm") as file:
        file.write(data)
        file.flush()
        examine(Path(file.name), fmt)


def _picture(data: bytes) -> None:
    """Put the picture into an archive of two classes, where its header is read."""
    _upload("zip", archive({"yes/1.png": data, "no/2.png": seeds()["image"][0]}))


def _config(data: bytes) -> None:
    config = model_lookup.parse(data, "someone/model")
    for task in TASKS:
        if task == "text_to_image":
            continue
        try:
            task_shape("someone/model", config, task)
        except InvalidInput:
            continue


def _yaml(data: bytes) -> None:
    text = data.decode(errors="replace")
    try:
        yaml_document.parse(text, "job.yaml")
    finally:
        yaml_document.parse_value(text)


_UPLOAD = (InvalidInput, MemoryError)
TARGETS: Mapping[str, Target] = {
    **{
        name: Target(run=partial(_upload, fmt), refusals=_UPLOAD)
        for name, fmt in (
            ("csv", "csv"), ("json", "json"), ("jsonl", "jsonl"), ("parquet", "parquet"), ("tar", "tar"),
            ("gzip", "tar"), ("zip", "zip"),
        )
    },
    "image": Target(run=_picture, refusals=_UPLOAD),
    "config": Target(run=_config, refusals=(InvalidInput,)),
    "spec": Target(
        run=partial(JobSpec.model_validate_json, strict=True), refusals=(ValidationError, InvalidInput), on_loop=True
    ),
    "yaml": Target(run=_yaml, refusals=(yaml_document.BadYaml,)),
    "heartbeat": Target(run=Heartbeat.model_validate_json, refusals=(ValidationError,), on_loop=True),
    "final": Target(run=Final.model_validate_json, refusals=(ValidationError,), on_loop=True),
}  # fmt: skip

"""What of a model is not in a checkpoint, and must be the same when it goes on: the weights under adapters, and the
code that the model brings.
"""

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from trainer.contract.train import TrainConfig, model_files
from trainer.core.errors import UserFault
from trainer.dataset.prompts import digest
from trainer.models import remote_code as trust

SUFFIX = ".safetensors"
SECOND = f"text_encoder_2/*{SUFFIX}"
"""Beside the files that every model for a task has: SDXL's."""
ADAPTERS = "its adapters belong to other weights"


def identity(config: TrainConfig) -> str:
    """A hash over the base's weight files, how they are quantised, and its own code. Raises OSError."""
    return ", ".join(
        filter(None, (_weights(config) if config.adapters is not None else "", trust.remote_code_fingerprint(config)))
    )


def _weights(config: TrainConfig) -> str:
    files = _files(config)
    found = hashlib.sha256("\n".join(f"{name} {digest}" for name, digest in sorted(files.items())).encode())
    quantised = config.quantised
    return f"sha256:{found.hexdigest()}{f', {quantised.bits} bits' if quantised else ''}"


def _files(config: TrainConfig) -> dict[str, str]:
    """Digests of the weight files by their path in the model: of a folder's content; the Hub's cache has them as names.

    Only of the folders that the task reads: what lies in others, as `onnx/`, is not under the adapters.
    """
    patterns = [one for one in (*model_files(config.task), SECOND) if one.endswith(SUFFIX)]
    folder = Path(config.model)
    if local := folder.is_dir():
        root = folder
    else:
        from huggingface_hub import snapshot_download

        root = Path(
            snapshot_download(config.model, revision=config.revision, allow_patterns=patterns, local_files_only=True)
        )
    paths = [path for pattern in patterns for path in root.glob(pattern)]
    return {p.relative_to(root).as_posix(): digest(p) if local else p.resolve().name for p in paths}


class Base:
    """The identity, worked out aside while the model is loaded; none where all weights are trained, by known code."""

    def __init__(self, config: TrainConfig) -> None:
        self._name = config.model
        self._what = "it belongs to other weights or code" if config.trust_remote_code else ADAPTERS
        self._found: Future[str] | None = None
        if config.adapters is not None or config.trust_remote_code:
            pool = ThreadPoolExecutor(1, "base")
            self._found = pool.submit(identity, config)
            pool.shutdown(wait=False)

    def name(self) -> str:
        """Waits for it. Raises OSError."""
        return self._found.result() if self._found else ""

    def check(self, other: str) -> None:
        """Raises UserFault where a checkpoint was made over another base."""
        if other != self.name():
            raise UserFault(
                f"checkpoint: {self._what} ({other}) than {self._name!r} has now "
                f"({self.name()}); give the model that it began with, or a new job"
            )

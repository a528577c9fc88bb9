"""Identity of the parts of a model that no checkpoint contains: the weights under adapters and the model's own code.

A checkpoint may only be resumed with the same identity.
"""

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from trainer.contract.data_config import model_files
from trainer.contract.train import TrainConfig
from trainer.core.errors import UserFault
from trainer.dataset.prompts import digest
from trainer.models import remote_code

SUFFIX = ".safetensors"
SECOND_TEXT_ENCODER = f"text_encoder_2/*{SUFFIX}"
"""Pattern of SDXL's second text encoder, in addition to the files that every model for the task has."""
OTHER_WEIGHTS = "its adapters belong to other weights"


def identity(config: TrainConfig) -> str:
    """Return a hash of the base's weight files, their quantisation and the model's own code. Raises OSError."""
    return ", ".join(
        filter(
            None, (_weights(config) if config.adapters is not None else "", remote_code.remote_code_fingerprint(config))
        )
    )


def _weights(config: TrainConfig) -> str:
    files = _files(config)
    hashed = hashlib.sha256("\n".join(f"{name} {digest}" for name, digest in sorted(files.items())).encode())
    quantised = config.quantised
    return f"sha256:{hashed.hexdigest()}{f', {quantised.bits} bits' if quantised else ''}"


def _files(config: TrainConfig) -> dict[str, str]:
    """Return the digests of the weight files by their path in the model.

    Files of a folder are hashed; in the Hub's cache the file names are the digests. Only folders that the task reads
    count, because others, such as `onnx/`, are not under the adapters.
    """
    patterns = [pattern for pattern in (*model_files(config.task), SECOND_TEXT_ENCODER) if pattern.endswith(SUFFIX)]
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


class BaseIdentity:
    """Identity of the base, computed in a thread while the model is loaded.

    It is empty for a full fine-tune without code of the model.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._name = config.model
        self._problem = "it belongs to other weights or code" if config.trust_remote_code else OTHER_WEIGHTS
        self._identity: Future[str] | None = None
        if config.adapters is not None or config.trust_remote_code:
            pool = ThreadPoolExecutor(1, "base")
            self._identity = pool.submit(identity, config)
            pool.shutdown(wait=False)

    def name(self) -> str:
        """Wait for the identity and return it. Raises OSError."""
        return self._identity.result() if self._identity else ""

    def check(self, other: str) -> None:
        """Raise UserFault for the identity of a checkpoint that was made with another base."""
        if other != self.name():
            raise UserFault(
                f"checkpoint: {self._problem} ({other}) than {self._name!r} has now "
                f"({self.name()}); give the model that it began with, or a new job"
            )

"""What of a model is not in a checkpoint, and must be the same when it goes on: the weights under adapters, and the
code that the model brings."""

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from trainer import trust
from trainer.contract.data import digest
from trainer.contract.train import TrainConfig
from trainer.faults import UserFault

PATTERN = "*.safetensors"
ADAPTERS = "its adapters belong to other weights"


def identity(config: TrainConfig) -> str:
    """A hash over the base's weight files, how they are quantised, and its own code. Raises OSError."""
    return ", ".join(filter(None, (_weights(config) if config.adapters is not None else "", trust.code(config))))


def _weights(config: TrainConfig) -> str:
    files = _files(config.model, config.revision)
    found = hashlib.sha256("\n".join(f"{name} {digest}" for name, digest in sorted(files.items())).encode())
    quantised = config.quantised
    return f"sha256:{found.hexdigest()}{f', {quantised.bits} bits' if quantised else ''}"


def _files(model: str, revision: str | None) -> dict[str, str]:
    """Digests of the weight files by name: of a folder's content; the Hub's cache has them as names."""
    folder = Path(model)
    if folder.is_dir():
        return {path.name: digest(path) for path in folder.glob(PATTERN)}
    from huggingface_hub import snapshot_download

    cached = Path(snapshot_download(model, revision=revision, allow_patterns=[PATTERN], local_files_only=True))
    return {path.name: path.resolve().name for path in cached.glob(PATTERN)}


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

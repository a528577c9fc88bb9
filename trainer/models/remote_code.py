"""Rules for a model's own code: it runs only if the job permits it, and only at a fixed revision.

With a broker, the job's spec carries the permission. A run without a broker needs `--trust-remote-code`.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from trainer.contract.data_config import model_files
from trainer.contract.train import PINNED, TrainConfig
from trainer.core.errors import Fault, UserFault
from trainer.models import availability

FLAG = "--trust-remote-code"
CODE_FILES = ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
"""Files of a model that may name code, in `auto_map`."""


def permission_problem(config: TrainConfig, *, flag: bool) -> str | None:
    """Return why a run without a broker may not execute the model's code, or None.

    `flag`: True if the user passed FLAG.
    """
    if config.trust_remote_code and not flag:
        return f"trust_remote_code: it runs the code of {config.model!r} on this machine; read it, then give {FLAG} too"
    return None


def load_options(config: TrainConfig) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for revision and code. Raises UserFault for code that may change."""
    if config.trust_remote_code:
        _check(config)
    return {"trust_remote_code": config.trust_remote_code, "revision": config.revision or "main"}


def _check(config: TrainConfig) -> None:
    if not Path(config.model).is_dir() and not PINNED.fullmatch(config.revision or ""):
        raise UserFault(
            f"train.revision: {config.model!r} brings code, which may change; give the commit (40 hex digits) that was "
            "read"
        )
    for name in CODE_FILES:
        for reference in _references(config, name):
            repository, separator, _ = reference.rpartition("--")
            if separator and repository != config.model:
                raise UserFault(
                    f"train.trust_remote_code: {name} of {config.model!r} takes code from {repository!r}, whose "
                    "revision nothing fixes; copy it into the model's folder"
                )


def _references(config: TrainConfig, name: str) -> list[str]:
    """Return `[repository--]module.Class` of each class that a file of the model refers to."""
    path = _file(config, name)
    if path is None:
        return []
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as e:
        raise _read_error(config, name, e) from None
    auto_map = document.get("auto_map", {}) if isinstance(document, dict) else {}
    values = auto_map.values() if isinstance(auto_map, dict) else ()
    names = [name for value in values for name in (value if isinstance(value, list) else [value])]
    return [name for name in names if isinstance(name, str)]


def _file(config: TrainConfig, name: str) -> Path | None:
    """Return the path of a file of the model on this machine; None: the model has no such file.

    Raises UserFault, and Fault if the Hub or this machine failed.
    """
    if Path(config.model).is_dir():
        path = Path(config.model) / name
        return path if path.exists() else None
    from huggingface_hub import errors, hf_hub_download

    try:
        return Path(hf_hub_download(config.model, name, revision=config.revision))
    except errors.EntryNotFoundError:
        return None
    except Exception as e:  # Errors of huggingface_hub and of the HTTP client below it.
        raise _read_error(config, name, e) from None


def _read_error(config: TrainConfig, name: str, error: Exception) -> Fault:
    fault = availability.read_fault(config, error)
    return fault or UserFault(f"train.model: cannot read {name} of {config.model!r} ({type(error).__name__})")


def remote_code_fingerprint(config: TrainConfig) -> str:
    """Return a fingerprint of the model's own code; empty: it has none. Raises OSError."""
    if not config.trust_remote_code:
        return ""
    folder = Path(config.model)
    if not folder.is_dir():
        return f"{config.model}@{config.revision}"
    hashed = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        hashed.update(f"{path.relative_to(folder)} {digest}\n".encode())
    return f"sha256:{hashed.hexdigest()}"


def commit(config: TrainConfig) -> str:
    """Return the Hub commit of the loaded model; empty for a folder, or if the cache does not contain the commit."""
    if Path(config.model).is_dir():
        return ""
    from huggingface_hub import try_to_load_from_cache

    index = model_files(config.task)[0]
    cached = try_to_load_from_cache(config.model, index, revision=config.revision or "main")
    return Path(cached).parent.name if isinstance(cached, str) else ""  # .../snapshots/<commit>/config.json

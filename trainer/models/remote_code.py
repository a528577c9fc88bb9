"""Code that a model brings: run where the job says so, of one known revision, and never because a file said so alone.

A job's spec is allowed by the broker that hands it out; a configuration that is run alone needs `--trust-remote-code`.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from trainer.contract.train import PINNED, TrainConfig, model_files
from trainer.core.errors import Fault, UserFault
from trainer.models import availability as reach

FLAG = "--trust-remote-code"
NAMING = ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
"""Files of a model that may name code, in `auto_map`."""


def unpermitted(config: TrainConfig, *, given: bool) -> str | None:
    """Why a configuration that is run alone may not run the model's code. `given`: the flag was."""
    if config.trust_remote_code and not given:
        return f"trust_remote_code: it runs the code of {config.model!r} on this machine; read it, then give {FLAG} too"
    return None


def loading(config: TrainConfig) -> dict[str, Any]:
    """What `from_pretrained` is given of a model's revision and code. Raises UserFault for code that may change."""
    if config.trust_remote_code:
        _check(config)
    return {"trust_remote_code": config.trust_remote_code, "revision": config.revision or "main"}


def _check(config: TrainConfig) -> None:
    if not Path(config.model).is_dir() and not PINNED.fullmatch(config.revision or ""):
        raise UserFault(
            f"train.revision: {config.model!r} brings code, which may change; give the commit (40 hex digits) that was "
            "read"
        )
    for name in NAMING:
        for reference in _references(config, name):
            repository, apart, _ = reference.rpartition("--")
            if apart and repository != config.model:
                raise UserFault(
                    f"train.trust_remote_code: {name} of {config.model!r} takes code from {repository!r}, whose "
                    "revision nothing fixes; copy it beside the model"
                )


def _references(config: TrainConfig, name: str) -> list[str]:
    """`[repository--]module.Class` of each class that a file names."""
    path = _file(config, name)
    if path is None:
        return []
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as e:
        raise _unread(config, name, e) from None
    named = found.get("auto_map", {}) if isinstance(found, dict) else {}
    values = named.values() if isinstance(named, dict) else ()
    return [one for value in values for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]


def _file(config: TrainConfig, name: str) -> Path | None:
    """A file of the model on this machine; None where the model has none. Raises UserFault, and Fault where the Hub or
    this machine is to blame.
    """
    if Path(config.model).is_dir():
        path = Path(config.model) / name
        return path if path.exists() else None
    from huggingface_hub import errors, hf_hub_download

    try:
        return Path(hf_hub_download(config.model, name, revision=config.revision))
    except errors.EntryNotFoundError:
        return None
    except Exception as e:  # of huggingface_hub, and of the client under it
        raise _unread(config, name, e) from None


def _unread(config: TrainConfig, name: str, error: Exception) -> Fault:
    fault = reach.not_read(config, error)
    return fault or UserFault(f"train.model: cannot read {name} of {config.model!r} ({type(error).__name__})")


def remote_code_fingerprint(config: TrainConfig) -> str:
    """What tells the code apart that the model runs with; empty where it brings none. Raises OSError."""
    if not config.trust_remote_code:
        return ""
    folder = Path(config.model)
    if not folder.is_dir():
        return f"{config.model}@{config.revision}"
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        found.update(f"{path.relative_to(folder)} {digest}\n".encode())
    return f"sha256:{found.hexdigest()}"


def commit(config: TrainConfig) -> str:
    """The commit of the Hub that the model was read at; empty for a folder, and where the cache does not say."""
    if Path(config.model).is_dir():
        return ""
    from huggingface_hub import try_to_load_from_cache

    index = model_files(config.task)[0]
    found = try_to_load_from_cache(config.model, index, revision=config.revision or "main")
    return Path(found).parent.name if isinstance(found, str) else ""  # .../snapshots/<commit>/config.json

"""Check that a model is available: a complete folder, or a Hub id that the token may read."""

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.contract.data_config import MODEL_FILES, model_files
from trainer.contract.train import TrainConfig
from trainer.core.errors import Fault, UserFault

HUB = "https://huggingface.co"
TIMEOUT_S = 20.0
MACHINE_ERRNOS = frozenset({errno.ENOSPC, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ESTALE})
"""Errors of this machine's disk or memory."""
BUSY_STATUSES = (408, 429)
"""HTTP statuses below 500 after which a later request may succeed."""


def check_model_available(model: str, files: Sequence[str] = MODEL_FILES, *, revision: str | None = None) -> str:
    """Return a description of the model's location. Reads no weights.

    `files`: patterns of files that a folder must have. Raises UserFault, e.g. with the page of a licence that must be
    accepted, and Fault if the Hub does not answer.
    """
    folder = Path(model)
    if folder.is_dir():
        missing = [p for p in files if not any(folder.glob(p))]
        if missing:
            raise UserFault(
                f"train.model: {model!r} lacks {', '.join(missing)}; save model and tokenizer with save_pretrained"
            )
        return "a folder of this machine"
    if model.startswith(("/", "./", "../", "~")):
        raise UserFault(f"train.model: no folder {model!r} on this machine; give an existing one or a Hub id")
    return _on_hub(model, revision, (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/"))


def read_fault(config: TrainConfig, error: BaseException) -> Fault | None:
    """Return the fault of this machine or of the Hub for which a model could not be read; None: the model is wrong.

    The Hub is asked once more, because the libraries raise an OSError for every failure.
    """
    causes = [*_causes(error)]
    for cause in causes:
        if isinstance(cause, OSError) and cause.errno in MACHINE_ERRNOS:
            return Fault(f"train.model: cannot read {config.model!r} on this machine ({os.strerror(cause.errno)})")
    if Path(config.model).is_dir():
        return None
    try:
        check_model_available(config.model, model_files(config.task), revision=config.revision)
    except Fault as fault:
        return fault
    if not _offline() and any(map(_is_temporary, causes)):
        return Fault(f"train.model: the Hub did not send all of {config.model!r}, though it answers by now")
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_temporary(cause: BaseException) -> bool:
    """Return True for an error of the connection or a temporary failure of the Hub."""
    from huggingface_hub import errors

    if isinstance(cause, errors.HfHubHTTPError):
        return cause.response.status_code >= 500 or cause.response.status_code in BUSY_STATUSES
    return isinstance(cause, (errors.LocalEntryNotFoundError, ConnectionError, TimeoutError))


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true")


def _on_hub(model: str, revision: str | None, endpoint: str) -> str:
    from huggingface_hub import HfApi, errors, get_token

    if _offline():
        return "the cache of this machine; HF_HUB_OFFLINE is set, so the Hub was not asked"
    api = HfApi(endpoint=endpoint)
    page = f"{endpoint}/{model}"
    try:
        info = api.model_info(model, revision=revision, timeout=TIMEOUT_S)
        if info.gated:
            api.auth_check(model)
    except errors.GatedRepoError:
        token = "the token has no access" if get_token() else "no token is set in HF_TOKEN"
        raise UserFault(
            f"train.model: {model!r} is gated and {token}; accept its licence at {page} and set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise UserFault(
            f"train.revision: {model!r} has no {revision!r}; {page}/commits/main lists its commits"
        ) from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise UserFault(
            f"train.model: the Hub has no {model!r} for this token; check the name at {page}, and HF_TOKEN"
        ) from None
    except (errors.HfHubHTTPError, OSError) as e:
        raise Fault(f"train.model: no usable answer from {endpoint} about {model!r} ({type(e).__name__})") from None
    except Exception as e:  # The HTTP client below huggingface_hub differs between releases.
        raise Fault(f"train.model: {endpoint} cannot be asked about {model!r} ({type(e).__name__})") from None
    if not any(file.rfilename.endswith(".safetensors") for file in info.siblings or ()):
        raise UserFault(f"train.model: {model!r} has no safetensors at {page}; take one that has, or convert it")
    return f"{page}{', gated, and this token may read it' if info.gated else ''}"

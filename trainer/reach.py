"""Whether the model can be had: a folder that is whole, or a Hub id that this token may read."""

import os
from collections.abc import Sequence
from pathlib import Path

from trainer.contract.train import MODEL_FILES
from trainer.faults import Fault, UserFault

HUB = "https://huggingface.co"
TIMEOUT_S = 20.0


def check(model: str, files: Sequence[str] = MODEL_FILES, *, revision: str | None = None) -> str:
    """Where the model lies, in words; no weight is read. A folder has to have `files` (patterns). Raises UserFault,
    with the page of a licence that has to be accepted, and Fault when the Hub does not answer."""
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


def _on_hub(model: str, revision: str | None, endpoint: str) -> str:
    from huggingface_hub import HfApi, errors, get_token

    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true"):
        return "the cache of this machine; HF_HUB_OFFLINE is set, so the Hub was not asked"
    api = HfApi(endpoint=endpoint)
    page = f"{endpoint}/{model}"
    try:
        found = api.model_info(model, revision=revision, timeout=TIMEOUT_S)
        if found.gated:
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
    except Exception as e:  # of the client under huggingface_hub, which changed from one release to the next
        raise Fault(f"train.model: {endpoint} cannot be asked about {model!r} ({type(e).__name__})") from None
    if not any(file.rfilename.endswith(".safetensors") for file in found.siblings or ()):
        raise UserFault(f"train.model: {model!r} has no safetensors at {page}; take one that has, or convert it")
    return f"{page}{', gated, and this token may read it' if found.gated else ''}"

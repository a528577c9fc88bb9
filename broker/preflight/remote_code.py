"""Whether a job may run the code that its model brings. It runs where the job does; nothing of it runs in here."""

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase

from broker.domain.errors import InvalidInput, Problem
from broker.preflight.model_lookup import is_folder
from trainer.contract.train import PINNED, TrainConfig


def check(train: TrainConfig | None, allowed: Sequence[str]) -> TrainConfig | None:
    """The same, with the folder that was looked at in the place of a link to it, which may lead elsewhere later.

    `allowed`: patterns of Hub ids and folders. Raises InvalidInput naming the setting that would allow it.
    """
    if train is None or not train.trust_remote_code:
        return train
    folder = is_folder(train.model)
    # A pattern of a folder must not be left by `..` or a link.
    model = os.path.realpath(os.path.expanduser(train.model)) if folder else train.model
    if not any(fnmatchcase(model, pattern) for pattern in allowed):
        message = (
            f"the code of {model!r} may not be run here; an administrator lists it in trainer.remote_code of "
            "gpubroker.yaml"
        )
        raise InvalidInput(Problem(field="train.trust_remote_code", message=message))
    if not folder and not PINNED.fullmatch(train.revision or ""):
        message = f"{model!r} brings code, which may change; give the commit (40 hex digits) that was read"
        raise InvalidInput(Problem(field="train.revision", message=message))
    return train.model_copy(update={"model": model})

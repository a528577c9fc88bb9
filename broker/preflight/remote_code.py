"""Permission to run code that a model contains. The code runs on the job's machine, never in the daemon."""

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase

from broker.domain.errors import InvalidInput, Problem
from broker.preflight.model_lookup import is_folder
from trainer.contract.train import PINNED, TrainConfig


def check(train: TrainConfig | None, allowed: Sequence[str]) -> TrainConfig | None:
    """Return the config with links in a model folder resolved, because a link may later point to other code.

    `allowed`: patterns of Hub ids and folders. Raises InvalidInput naming the setting that would allow the model.
    """
    if train is None or not train.trust_remote_code:
        return train
    folder = is_folder(train.model)
    # The real path prevents `..` or a link from leaving an allowed folder.
    model = os.path.realpath(os.path.expanduser(train.model)) if folder else train.model
    if not any(fnmatchcase(model, pattern) for pattern in allowed):
        message = (
            f"the code of {train.model!r} is not allowed; an administrator can allow it in trainer.remote_code of "
            "gpubroker.yaml"
        )
        raise InvalidInput(Problem(field="train.trust_remote_code", message=message))
    if not folder and not PINNED.fullmatch(train.revision or ""):
        message = f"{model!r} contains code, which may change; give the reviewed commit (40 hex digits)"
        raise InvalidInput(Problem(field="train.revision", message=message))
    return train.model_copy(update={"model": model})

"""Check that a model's files contain all of its weights, because transformers fills missing weights at random."""

from collections.abc import Collection
from typing import Any

from trainer.contract.train import TrainConfig
from trainer.core.errors import UserFault

NAMED_WEIGHTS = 3
"""Number of weights that the error names."""


def check_missing_weights(config: TrainConfig, model: Any, new_keys: Collection[str], *, headed: bool) -> None:
    """Raise UserFault if the files lack weights of the model.

    `new_keys`: weights that are in no file or have another shape there; `headed`: weights of a head may be new.
    Adapters over random weights would be useless, because the weights are saved nowhere. Computed tensors, such as
    the angles of rotary positions, are buffers and are ignored: some models save them and others do not.
    """
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    missing = sorted(name for name in new_keys if name in weights and not (headed and _is_head_weight(model, name)))
    if missing:
        more = ", ..." if len(missing) > NAMED_WEIGHTS else ""
        raise UserFault(
            f"train.model: the safetensors of {config.model!r} lack {len(missing)} of its weights, or have them in "
            f"another shape ({', '.join(missing[:NAMED_WEIGHTS])}{more}); give a model whose files are whole"
        )


def _is_head_weight(model: Any, name: str) -> bool:
    """Return True for a weight of a head, or of a pooler, which some models have in their base for the head alone."""
    base = model.base_model_prefix
    return not base or not name.startswith(f"{base}.") or "pooler" in name

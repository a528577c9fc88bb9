"""Whether a model's files hold all of its weights: transformers makes up what they lack, at random."""

from collections.abc import Collection
from typing import Any

from trainer.contract.train import TrainConfig
from trainer.core.errors import UserFault

NAMED = 3


def refuse_missing_weights(config: TrainConfig, model: Any, made_up: Collection[str], *, headed: bool) -> None:
    """`made_up`: weights that no file gave, or one of another shape; `headed`: those of a head may be among them.

    Raises UserFault. Adapters over random weights would belong to weights that are nowhere. What a model computes for
    itself, such as the angles of rotary positions, lies in buffers, which some save and others do not.
    """
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    gone = sorted(name for name in made_up if name in weights and not (headed and _of_a_head(model, name)))
    if gone:
        more = ", ..." if len(gone) > NAMED else ""
        raise UserFault(
            f"train.model: the safetensors of {config.model!r} lack {len(gone)} of its weights, or have them in "
            f"another shape ({', '.join(gone[:NAMED])}{more}); give a model whose files are whole"
        )


def _of_a_head(model: Any, name: str) -> bool:
    """A pooler as well, which lies in the base of some models though only a head reads it."""
    base = model.base_model_prefix
    return not base or not name.startswith(f"{base}.") or "pooler" in name

"""How far a model reaches, and whether rows go further."""

from typing import Any

from trainer.contract.architectures import SCALED_ROTARY
from trainer.contract.train import TrainConfig
from trainer.core.errors import UserFault
from trainer.models import loading as models


def learned(config: TrainConfig) -> int | None:
    """Tokens that a model reaches at the most, where its positions are a table; None for rotary ones, which go on, and
    where nothing says. Raises UserFault.
    """
    found = models.config_of(config).get_text_config()
    made = getattr(found, "max_position_embeddings", None)
    rotary = getattr(found, "rope_parameters", None) is not None
    return made if isinstance(made, int) and made > 0 and not rotary else None


def insist(config: TrainConfig, longest: int) -> None:
    """`longest`: tokens of the longest sequence within `max_length`. Raises UserFault for rows that the model has no
    positions for: at the first of them it would fail, and the machine would be blamed.
    """
    positions = _reach(models.config_of(config))
    trained = config.max_length if config.packing else longest
    if positions is not None and trained > positions:
        raise UserFault(
            f"train.max_length: rows reach {trained} tokens, {config.model!r} has {positions} positions; lower it"
        )


def _reach(config: Any) -> int | None:
    """Of a model; None where nothing says. Scaled rotary ones reach further than it was made for: of `llama3` and
    `longrope` the config's own count is that already.
    """
    made = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if not isinstance(made, int) or made < 1:  # XLNet's say -1
        return None
    if rope.get("rope_type") not in SCALED_ROTARY:
        return made
    return max(made, int((rope.get("original_max_position_embeddings") or made) * rope.get("factor", 1.0)))

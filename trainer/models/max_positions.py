"""Largest sequence length of a model, and the check that no row is longer."""

from typing import Any

from trainer.contract.architectures import SCALED_ROTARY, position_offset
from trainer.contract.train import TrainConfig
from trainer.core.errors import UserFault
from trainer.models import loading


def learned_positions(config: TrainConfig) -> int | None:
    """Return the largest sequence length in tokens of a model with a table of positions. Raises UserFault.

    None: the model has rotary positions, which have no hard limit, or its config has no limit.
    """
    text_config = loading.config_of(config).get_text_config()
    count = _count(text_config)
    is_rotary = getattr(text_config, "rope_parameters", None) is not None
    return count if count is not None and not is_rotary else None


def check_length(config: TrainConfig, longest: int, row: int = 0) -> None:
    """Raise UserFault for rows that are longer than the model's positions.

    `longest`: tokens of the longest sequence, cut to `max_length`. `row`: its number from 1; 0: unknown. Without this
    check the run fails at the first such row, which looks like a fault of the machine.
    """
    positions = _position_limit(loading.config_of(config))
    trained = config.max_length if config.packing else longest
    if positions is not None and trained > positions:
        place = f" (row {row})" if row and not config.packing else ""
        raise UserFault(
            f"train.max_length: rows reach {trained} tokens{place}, {config.model!r} has {positions} positions; lower "
            f"it to {positions}"
        )


def _position_limit(config: Any) -> int | None:
    """Return the largest sequence length of a model in tokens; None: its config has no limit.

    Scaled rotary positions extend the original length. For `llama3` and `longrope` the config's count includes this.
    """
    count = _count(config)
    rope = getattr(config, "rope_parameters", None) or {}
    if count is None:
        return None
    if rope.get("rope_type") not in SCALED_ROTARY:
        return count
    return max(count, int((rope.get("original_max_position_embeddings") or count) * rope.get("factor", 1.0)))


def _count(config: Any) -> int | None:
    """Return the config's number of positions from a row's first token on; None: the config has no limit."""
    count = getattr(config, "max_position_embeddings", None)
    if not isinstance(count, int) or count < 1:  # XLNet's config has -1.
        return None
    return count - position_offset(config.to_dict())

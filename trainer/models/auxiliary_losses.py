"""Losses that a model's config asks for in addition to the cross-entropy, as transformers adds them.

`output_router_logits` asks for the load-balancing loss of a mixture of experts (Fedus et al. 2021, arXiv 2101.03961),
`z_loss_coefficient` for the z-loss of Bamba. The language models of `trainer.tasks` add them.
"""

from typing import Any

import torch

from trainer.contract.train import TrainConfig
from trainer.core.errors import UserFault
from trainer.models import loading

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Attributes of models and of configs with the factor of the load-balancing loss."""
ROUTER_LOGITS = "output_router_logits"


def auxiliary_sum(model: Any, outputs: Any, targets: torch.Tensor) -> torch.Tensor | float:
    """Return the losses of a batch in the form of `TaskModel.loss_sum`, without the cross-entropy; 0.0: none.

    transformers adds them to the mean of the cross-entropy, so each counts once for each target. `outputs`: of a causal
    model. `targets`: a scalar, the number of targets in the batch. Raises UserFault.
    """
    added: torch.Tensor | float = 0.0
    balance = getattr(outputs, "aux_loss", None)
    if isinstance(balance, torch.Tensor):
        added = _balance_factor(model) * balance.float() * targets
    if factor := _attribute(model, ("z_loss_coefficient",)):
        added = added + factor * outputs.logits.logsumexp(dim=-1).float().pow(2).mean() * targets
    return added


def asks_for_router_loss(model_config: Any) -> bool:
    """Return True if a config of transformers asks for the router's losses."""
    configs = (model_config, model_config.get_text_config())
    return any(bool(getattr(config, ROUTER_LOGITS, False)) for config in configs)


def check_none(config: TrainConfig) -> None:
    """Raise UserFault if the model's config asks for a loss that the task does not add."""
    model_config = loading.config_of(config)
    setting = ROUTER_LOGITS if asks_for_router_loss(model_config) else ""
    setting = setting or ("z_loss_coefficient" if getattr(model_config, "z_loss_coefficient", 0) else "")
    if setting:
        raise UserFault(
            f"train.model: the config.json of {config.model!r} sets {setting}, and task {config.task} adds no such "
            "loss; remove it in a copy of the model"
        )


def _balance_factor(model: Any) -> float:
    factor = _attribute(model, COEFFICIENTS)
    if factor is None:
        config = model.config.get_text_config()
        factor = next((getattr(config, name) for name in COEFFICIENTS if hasattr(config, name)), None)
    if factor is None:
        raise UserFault(
            f"train.model: its config.json sets {ROUTER_LOGITS} without {COEFFICIENTS[0]}; add it, or remove the first"
        )
    return float(factor)


def _attribute(model: Any, names: tuple[str, ...]) -> float | None:
    """Return the first number of these names that the model has; the model may be wrapped by peft or by processes."""
    for _ in range(8):
        for name in names:
            if isinstance(value := vars(model).get(name), int | float):
                return float(value)
        inner = next((m for m in map(model._modules.get, ("module", "base_model", "model")) if m is not None), None)
        if inner is None:
            return None
        model = inner
    return None

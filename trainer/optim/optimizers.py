"""Optimizers by name over the trained parameters, and their states as exact tensors for a checkpoint."""

from collections.abc import Mapping
from typing import Any

import torch

from trainer.contract.train import OptimConfig
from trainer.core.errors import UserFault

Parameters = Mapping[str, torch.nn.Parameter]
WHOLE = ("adamw_8bit", "adafactor")
"""Optimizers whose states differ in shape from the weights, so that FSDP cannot shard them."""
UNSET = 0.0
"""Placeholder for the learning rate, which each step sets."""


def build_optimizer(parameters: Parameters, optim: OptimConfig, *, divided: bool = False) -> torch.optim.Optimizer:
    """Return the configured optimizer, without weight decay for vectors (norms, biases).

    `divided`: True if FSDP shards the weights. Raises UserFault.
    """
    if divided and optim.name in WHOLE:
        raise UserFault(f"train.optim.name: {optim.name} cannot be divided by FSDP; use adamw, or a plan with DDP")
    groups: dict[Any, list[torch.nn.Parameter]] = {}
    for p in sorted(parameters.values(), key=lambda p: p.ndim < 2):
        # A fused kernel needs parameters with the same sharding.
        groups.setdefault((p.ndim >= 2, getattr(p, "device_mesh", None)), []).append(p)
    param_groups = [{"params": some, "weight_decay": optim.weight_decay * wide} for (wide, _), some in groups.items()]
    betas = optim.beta1, optim.beta2
    match optim.name:
        case "adamw_8bit":
            from bitsandbytes.optim import adamw

            optimizer: torch.optim.Optimizer = adamw.AdamW8bit(param_groups, lr=UNSET, betas=betas)
            return optimizer
        case "adafactor":  # One weight after the other: all at once take as much memory as AdamW's moments.
            return torch.optim.Adafactor(param_groups, lr=UNSET, foreach=False)
        case "sgd":
            return torch.optim.SGD(param_groups, lr=UNSET, foreach=False)
    return torch.optim.AdamW(param_groups, lr=UNSET, betas=betas, fused=True)


def tensors(optimizer: Any, parameters: Parameters) -> dict[str, torch.Tensor]:
    """Return the states by `<parameter>/<kind>`; a Python number becomes an integer tensor without dimensions."""
    return {
        f"{name}/{kind}": value if isinstance(value, torch.Tensor) else torch.tensor(int(value))
        for name, p in parameters.items()
        for kind, value in optimizer.state.get(p, {}).items()
    }


def state(tensor: torch.Tensor) -> torch.Tensor | int:
    """Convert a tensor of `tensors` back to the optimizer's state."""
    return int(tensor) if tensor.ndim == 0 and tensor.dtype is torch.int64 else tensor

"""Optimizers by name, over what is trained, and their states as tensors that a checkpoint holds exactly."""

from collections.abc import Mapping
from typing import Any

import torch

from trainer.contract.train import OptimConfig
from trainer.core.errors import UserFault

Parameters = Mapping[str, torch.nn.Parameter]
WHOLE = ("adamw_8bit", "adafactor")
"""Keep states of other shapes than the weights, which FSDP cannot divide."""


UNSET = 0.0


def of(parameters: Parameters, optim: OptimConfig, *, divided: bool = False) -> torch.optim.Optimizer:
    """Vectors (norms, biases) are not decayed; each step sets its own learning rate. `divided`: weights are shared out
    (FSDP). Raises UserFault.
    """
    if divided and optim.name in WHOLE:
        raise UserFault(f"train.optim.name: {optim.name} cannot be divided by FSDP; use adamw, or a plan with DDP")
    groups: dict[Any, list[torch.nn.Parameter]] = {}
    for p in sorted(parameters.values(), key=lambda p: p.ndim < 2):
        groups.setdefault((p.ndim >= 2, getattr(p, "device_mesh", None)), []).append(p)  # one kernel: divided alike
    kept = [{"params": some, "weight_decay": optim.weight_decay * wide} for (wide, _), some in groups.items()]
    betas = optim.beta1, optim.beta2
    match optim.name:
        case "adamw_8bit":
            from bitsandbytes.optim import adamw

            found: torch.optim.Optimizer = adamw.AdamW8bit(kept, lr=UNSET, betas=betas)
            return found
        case "adafactor":  # one weight after the other, since all at once take as much memory as AdamW's moments
            return torch.optim.Adafactor(kept, lr=UNSET, foreach=False)
        case "sgd":
            return torch.optim.SGD(kept, lr=UNSET, foreach=False)
    return torch.optim.AdamW(kept, lr=UNSET, betas=betas, fused=True)


def tensors(optimizer: Any, parameters: Parameters) -> dict[str, torch.Tensor]:
    """The states as `<parameter>/<kind>`; a Python number as a whole one without dimensions."""
    return {
        f"{name}/{kind}": value if isinstance(value, torch.Tensor) else torch.tensor(int(value))
        for name, p in parameters.items()
        for kind, value in optimizer.state.get(p, {}).items()
    }


def state(tensor: torch.Tensor) -> torch.Tensor | int:
    """A state as the optimizer has it, of what `tensors` made of it."""
    return int(tensor) if tensor.ndim == 0 and tensor.dtype is torch.int64 else tensor

"""What makes steps faster where a machine can do it. Where it cannot, the run goes on without, and says so once."""

import importlib.util
import os
import sys
from collections.abc import Iterable
from typing import Any

import torch

from trainer.contract.train import Attention

TF32 = (8, 0)
"""Compute capability of the first GPUs that have it (Ampere)."""


def notice(line: str) -> None:
    """Into the job's log, once for all processes."""
    if os.environ.get("RANK", "0") == "0":
        print(f"notice: {line}", file=sys.stdout, flush=True)


def attention(wanted: Attention) -> str:
    """transformers' name of the kernel."""
    if wanted != "flash":
        return wanted
    if torch.cuda.is_available() and importlib.util.find_spec("flash_attn"):
        return "flash_attention_2"
    notice("train.attention: flash-attn is not on this machine; sdpa is used, which has torch's own flash kernel")
    return "sdpa"


def has_kernel(model: Any, wanted: Attention) -> bool:
    """Whether transformers has that kernel for a model, by what its class says; diffusers' say nothing."""
    marks = {"sdpa": "_supports_sdpa", "flash": "_supports_flash_attn"}
    return wanted not in marks or bool(getattr(model, marks[wanted], True))


def tf32(device: torch.device) -> bool:
    """Turns it on where the GPU has it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < TF32:
        notice(f"train.tf32: {_named(device)} has no TF32; float32 is computed in full")
        return False
    torch.set_float32_matmul_precision("high")
    return True


def compiled(layers: Iterable[torch.nn.Module], device: torch.device, **how: Any) -> bool:
    """Compiles each layer in place, for rows of any length from the start: a kernel made for the first length that
    comes would make a resumed run differ. Not where a product cannot be compiled, as without a C compiler."""
    try:
        probe = torch.compile(_probe, **how)
        probe(torch.ones(4, 4, device=device, requires_grad=True)).backward()
    except Exception as e:
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        notice(f"train.compile: torch.compile does not work on this machine ({reason[:200]}); layers run as they are")
        return False
    for layer in layers:
        layer.compile(dynamic=True, **how)
    return True


def _probe(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).relu().sum()


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"

"""What makes steps faster where a machine can do it. Where it cannot, the run goes on without, and says so once."""

import importlib.util
import os
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainer.contract.train import Attention

TF32 = (8, 0)
"""Compute capability of the first GPUs that have it (Ampere)."""


FP8 = (8, 9)
"""Likewise (Ada, Hopper)."""


def notice(line: str) -> None:
    """Into the job's log, once for all processes."""
    if os.environ.get("RANK", "0") == "0":
        print(f"notice: {line}", file=sys.stdout, flush=True)


def attention(wanted: Attention) -> str:
    """Transformers' name of the kernel."""
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


def fp8(layers: Iterable[torch.nn.Module], device: torch.device, *, emulate: bool = False) -> bool:
    """Multiplies in 8 bits in the layers, where a linear module is trained and takes it: its scales are made anew from
    each tensor, so there is no state to save. What lies outside of the layers, head and embeddings, stays as it is.

    `emulate`: on any device, as a GPU with it would.
    """
    why = "" if emulate else _lacks_fp8(device)
    if not why:
        try:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            # Of a weight's gradient the tokens are the inner dimension, of which there may be any number.
            how = Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
            layers = [*layers]
            found = [layer for layer in layers if any(_takes_fp8(m) for m in layer.modules())]
            for layer in found:
                convert_to_float8_training(layer, module_filter_fn=lambda module, name: _takes_fp8(module), config=how)
        except Exception as e:
            why = f"torchao does not work on this machine ({_first_line(e)})"
        else:
            why = "" if found else _takes_none(layers)
    if why:
        notice(f"train.fp8: {why}; linear modules compute as without it")
    return not why


def _lacks_fp8(device: torch.device) -> str:
    """Why this machine cannot; empty: it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8:
        return f"{_named(device)} has no fp8"
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not on this machine (pip install 'gpubroker[fp8]')"
    return ""


def _takes_none(layers: Iterable[torch.nn.Module]) -> str:
    """Why no module of the layers computes in fp8."""
    weights = (m.weight for layer in layers for m in layer.modules() if type(m) is torch.nn.Linear)
    if any(isinstance(weight, DTensor) for weight in weights):
        return "the weights are divided among the processes (FSDP or tensor parallelism), which it is not done over"
    return "no linear module is trained whole that has dimensions in multiples of 16"


def _takes_fp8(module: torch.nn.Module) -> bool:
    """Neither quantised, nor divided by FSDP or tensor parallelism, nor a frozen one: torchao would compute its
    gradient.
    """
    if type(module) is not torch.nn.Linear or type(module.weight) is not torch.nn.Parameter:
        return False
    return module.weight.requires_grad and not module.in_features % 16 and not module.out_features % 16


def compiled(layers: Iterable[torch.nn.Module], device: torch.device, **how: Any) -> bool:
    """Compiles each layer in place, for rows of any length from the start: a kernel made for the first length that
    comes would make a resumed run differ. Not where a product cannot be compiled, as without a C compiler.
    """
    try:
        probe = torch.compile(_probe, **how)
        probe(torch.ones(4, 4, device=device, requires_grad=True)).backward()
    except Exception as e:
        notice(f"train.compile: torch.compile does not work on this machine ({_first_line(e)}); layers run as they are")
        return False
    for layer in layers:
        layer.compile(dynamic=True, **how)
    return True


def _probe(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).relu().sum()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"

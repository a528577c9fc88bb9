"""Optional accelerations: attention kernels, TF32, fp8 and compilation.

On a machine without an acceleration the run continues without it and logs one notice.
"""

import importlib.util
import os
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainer.contract.train import Attention

TF32 = (8, 0)
"""Compute capability of the first GPUs with TF32 (Ampere)."""
FP8 = (8, 9)
"""Compute capability of the first GPUs with fp8 (Ada, Hopper)."""


def notice(line: str) -> None:
    """Write a line to the job's log, from the first process only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"notice: {line}", file=sys.stdout, flush=True)


def attention(kernel: Attention) -> str | None:
    """Return transformers' name of the attention kernel to use, or None for the model's default.

    The default also replaces `flash` on a machine without CUDA or flash-attn.
    """
    if kernel == "auto":
        return None
    if kernel != "flash":
        return kernel
    if torch.cuda.is_available() and importlib.util.find_spec("flash_attn"):
        return "flash_attention_2"
    notice("train.attention: flash-attn is not on this machine; the model's default is used, as with auto")
    return None


def has_kernel(model: Any, kernel: Attention) -> bool:
    """Return True if the model's class supports the kernel; models of diffusers do not declare this."""
    attributes = {"sdpa": "_supports_sdpa", "flash": "_supports_flash_attn"}
    return kernel not in attributes or bool(getattr(model, attributes[kernel], True))


def tf32(device: torch.device) -> bool:
    """Turn TF32 on and return True if the GPU has it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < TF32:
        notice(f"train.tf32: {_device_name(device)} has no TF32; float32 is computed in full")
        return False
    torch.set_float32_matmul_precision("high")
    return True


def fp8(layers: Iterable[torch.nn.Module], device: torch.device, *, emulate: bool = False) -> bool:
    """Convert the trained linear modules of the layers to fp8 products; return False if this is impossible.

    The scales are computed from each tensor, so there is no state to save. Head and embeddings do not change.
    `emulate`: compute the same results on a device without fp8.
    """
    reason = "" if emulate else _device_reason(device)
    if not reason:
        try:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            # The inner dimension of a weight's gradient is the number of tokens, which may be no multiple of 16.
            options = Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
            layers = [*layers]
            suitable = [layer for layer in layers if any(_suits_fp8(m) for m in layer.modules())]
            for layer in suitable:
                convert_to_float8_training(layer, module_filter_fn=lambda m, name: _suits_fp8(m), config=options)
        except Exception as e:
            reason = f"torchao does not work on this machine ({_first_line(e)})"
        else:
            reason = "" if suitable else _layers_reason(layers)
    if reason:
        notice(f"train.fp8: {reason}; linear modules compute without fp8")
    return not reason


def _device_reason(device: torch.device) -> str:
    """Return why this machine cannot compute in fp8; empty: fp8 is possible."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8:
        return f"{_device_name(device)} has no fp8"
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not on this machine (pip install 'gpubroker[fp8]')"
    return ""


def _layers_reason(layers: Iterable[torch.nn.Module]) -> str:
    """Return why no module of the layers can compute in fp8."""
    weights = (m.weight for layer in layers for m in layer.modules() if type(m) is torch.nn.Linear)
    if any(isinstance(weight, DTensor) for weight in weights):
        return "the weights are divided among the processes (FSDP or tensor parallelism), and fp8 needs whole weights"
    return "no linear module is trained whole and has dimensions that are multiples of 16"


def _suits_fp8(module: torch.nn.Module) -> bool:
    """Return True for a trained linear module that is neither quantised nor divided by FSDP or tensor parallelism.

    Frozen modules are excluded, because torchao would compute their gradient.
    """
    if type(module) is not torch.nn.Linear or type(module.weight) is not torch.nn.Parameter:
        return False
    return module.weight.requires_grad and not module.in_features % 16 and not module.out_features % 16


def compiled(layers: Iterable[torch.nn.Module], device: torch.device, **options: Any) -> bool:
    """Compile each layer in place; return False if this machine cannot compile, e.g. without a C compiler.

    The kernels support rows of any length from the start. A kernel for the first row's length would make a resumed run
    differ. `options`: arguments of `torch.compile`.
    """
    try:
        probe = torch.compile(_probe, **options)
        probe(torch.ones(4, 4, device=device, requires_grad=True)).backward()
    except Exception as e:
        notice(f"train.compile: torch.compile does not work on this machine ({_first_line(e)}); layers run as they are")
        return False
    for layer in layers:
        layer.compile(dynamic=True, **options)
    return True


def _probe(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).relu().sum()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"

"""A base of 4 bits for the tracer: transformers' and bitsandbytes' own modules and autograd, on the meta device.

bitsandbytes knows the sizes of what its kernels make; what they take besides is done here in the parts that they have.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trainer.contract.train import TrainConfig
from trainer.models import loading as models


def quantise(model: Any, config: TrainConfig, architecture: str, kept: torch.dtype, *, norms: bool) -> Any:
    """In place, as loading does; the weights' bytes are those of NF4 with quantised scales. `norms`: they are raised to
    float32, as the trainer has them. Raises ValueError for 8 bits, whose kernels have no sizes of their own.
    """
    import bitsandbytes
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.auto import AutoHfQuantizer

    method = config.quantised
    if method is None or method.bits != 4:
        raise ValueError("a base of 8 bits cannot be traced; leave out --exact")
    how = models._quantisation(method, kept, architecture)
    quantiser = AutoHfQuantizer.from_config(how)
    left = quantiser.get_modules_to_not_convert(model, how.llm_int8_skip_modules, model._keep_in_fp32_modules)
    before = {name: module.weight for name, module in model.named_modules() if hasattr(module, "weight")}
    replace_with_bnb_linear(model, modules_to_not_convert=left, quantization_config=how)
    with torch.device("cpu"):  # bitsandbytes reads its numbers when it makes it
        bitsandbytes.functional.name2qmap.setdefault("dynamic", bitsandbytes.functional.create_dynamic_map())
    for name, found in model.named_modules():
        if isinstance(found, bitsandbytes.nn.modules.Linear4bit):
            module: Any = found
            value = before.pop(name).detach()
            value = value.T if "Conv1D" in module.source_cls.__name__ else value
            new = type(module.weight)(value, requires_grad=False, **module.weight.__dict__)
            module.weight = new._quantize(value.device)
            if module.bias is not None and not value.is_meta:  # where it is still
                zeros = torch.zeros_like(module.bias, device=value.device, dtype=value.dtype)
                module.bias = torch.nn.Parameter(zeros, requires_grad=False)
    if norms:
        models._prepare(model)
    return quantiser._process_model_after_weight_loading(model)  # by what this sets peft knows a base of 4 bits


def scales(model: Any) -> Iterator[torch.Tensor]:
    """What a quantised base holds beside its weights."""
    for module in model.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        while state is not None:
            yield from (v for v in vars(state).values() if isinstance(v, torch.Tensor))
            state = state.state2


def in_parts(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """A product with a matrix of 4 bits: its scales and the matrix are unpacked first, for many rows (bitsandbytes'
    own default; its kernel for few rows does without). None for any other operation.
    """
    if str(func) != "bitsandbytes.gemm_4bit.default":
        return None
    from bitsandbytes.backends.default.ops import _gemm_4bit_default_impl

    return _gemm_4bit_default_impl(*args, **kwargs)

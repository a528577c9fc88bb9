"""4-bit base model for the tracer: the modules and autograd of transformers and bitsandbytes on the meta device.

On the meta device, bitsandbytes returns results of the right sizes, but allocates no temporary memory of its kernels.
This module adds that memory by running each kernel as its single operations.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trainer.contract.train import TrainConfig
from trainer.models import loading


def quantise(model: Any, config: TrainConfig, architecture: str, dtype: torch.dtype, *, norms: bool) -> Any:
    """Quantise the model in place, as loading does, to NF4 with quantised scales.

    `norms`: True casts the norms to float32, as the trainer does. Raises ValueError for 8 bits, because those kernels
    do not run on the meta device.
    """
    import bitsandbytes
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.auto import AutoHfQuantizer

    method = config.quantised
    if method is None or method.bits != 4:
        raise ValueError("a base of 8 bits cannot be traced; leave out --exact")
    quantisation = loading._quantisation(method, dtype, architecture)
    quantiser = AutoHfQuantizer.from_config(quantisation)
    excluded = quantiser.get_modules_to_not_convert(
        model, quantisation.llm_int8_skip_modules, model._keep_in_fp32_modules
    )
    weights = {name: module.weight for name, module in model.named_modules() if hasattr(module, "weight")}
    replace_with_bnb_linear(model, modules_to_not_convert=excluded, quantization_config=quantisation)
    with torch.device("cpu"):  # bitsandbytes reads the table's numbers when it creates it
        bitsandbytes.functional.name2qmap.setdefault("dynamic", bitsandbytes.functional.create_dynamic_map())
    for name, replaced in model.named_modules():
        if isinstance(replaced, bitsandbytes.nn.modules.Linear4bit):
            module: Any = replaced
            value = weights.pop(name).detach()
            value = value.T if "Conv1D" in module.source_cls.__name__ else value
            replacement = type(module.weight)(value, requires_grad=False, **module.weight.__dict__)
            module.weight = replacement._quantize(value.device)
            if module.bias is not None and not value.is_meta:  # real biases are still on the meta device
                zeros = torch.zeros_like(module.bias, device=value.device, dtype=value.dtype)
                module.bias = torch.nn.Parameter(zeros, requires_grad=False)
    if norms:
        loading._prepare_quantised(model)
    return quantiser._process_model_after_weight_loading(model)  # peft recognises a 4-bit base by what this sets


def scales(model: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a quantised base holds in addition to its weights."""
    for module in model.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        while state is not None:
            yield from (v for v in vars(state).values() if isinstance(v, torch.Tensor))
            state = state.state2


def decomposed_gemm(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run a product with a 4-bit matrix as single operations; return None for any other operation.

    The operations unpack the scales and the matrix first, as bitsandbytes does for many rows. The kernel for few rows
    does not unpack them.
    """
    if str(func) != "bitsandbytes.gemm_4bit.default":
        return None
    from bitsandbytes.backends.default.ops import _gemm_4bit_default_impl

    return _gemm_4bit_default_impl(*args, **kwargs)

"""Emulates on the meta device which tensors CUDA or CPU kernels save: autocast, attention, dropout, AdamW.

Autocast does not support the meta device. The trainer's own Accelerator switches the CPU's autocast on and off around
the model, and checkpointing restores it for recomputation. This module reads that switch and applies the casts itself.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

LOWERED = frozenset(
    {
        *(functional.linear, functional.conv1d, functional.conv2d, functional.scaled_dot_product_attention),
        functional.prelu,
        *(torch.matmul, torch.mm, torch.bmm, torch.baddbmm, torch.addmm, torch.Tensor.matmul, torch.Tensor.bmm),
        *(torch.Tensor.__matmul__, torch.Tensor.__rmatmul__),
        *(torch.einsum, torch.tensordot),  # made of products that autocast lowers one by one
    }
)
"""Functions that autocast computes in half precision on every device (torch's autocast_mode.h)."""
RAISED_ON_CUDA = frozenset(
    {
        *(functional.layer_norm, functional.group_norm, functional.mse_loss),
        *(functional.softmax, functional.log_softmax, torch.softmax, torch.Tensor.softmax),
        *(torch.pow, torch.Tensor.pow, torch.Tensor.__pow__, torch.square, torch.rsqrt, torch.cumsum),
        *(torch.exp, torch.expm1, functional.softplus),
    }
)
"""Functions that CUDA's autocast computes in float32; the CPU's autocast leaves them unchanged."""
BLOCK = {"cuda": 512, "cpu": 1}
"""Granularity of the allocator in bytes: it rounds sizes up to a multiple."""


class _Attention(torch.autograd.Function):
    """Attention that saves and allocates what a flash kernel does; the CPU's kernel has almost no workspace."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, bias: Any, cuda: bool) -> Any:
        batch, heads, length, _ = q.shape
        with torch.enable_grad():  # the tracer recognises forward work by this, also when it is recomputed
            out = q.new_empty((batch, length, heads, v.shape[-1])).transpose(1, 2).detach()
            sums = q.new_empty((batch, heads, length), dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, sums, *(() if bias is None else (bias,)))
        ctx.cuda, ctx.biased = cuda, bias is not None
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, k, v, *more = ctx.saved_tensors
        batch, heads, length, width = q.shape
        workspace = []
        if ctx.cuda:  # sums of dq in float32, padded to the kernel's tiles; dk and dv of every head of a group
            rows, columns = -(-length // 128) * 128, -(-width // 32) * 32
            workspace.append(q.new_empty((batch, heads, rows, columns + 1), dtype=torch.float32))
            if k.shape[1] != heads:
                workspace += [k.new_empty((batch, k.shape[2], heads, width)) for _ in range(2)]
        head_gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        workspace.clear()
        return *head_gradients, _bias_gradient(ctx, q, k, more[-1]), None


def _bias_gradient(ctx: Any, q: Any, k: Any, bias: Any) -> Any:
    """Return the bias's gradient. The kernel makes it for every row and head; shared elements are summed."""
    if not ctx.biased or not ctx.needs_input_grad[3]:
        return None
    return q.new_empty((*q.shape[:3], k.shape[2])).sum_to_size(bias.shape)


class DeviceEmulation(TorchFunctionMode):
    """Torch function mode that applies the device-dependent behaviour of torch; `device` is `cuda` or `cpu`."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._cuda = device == "cuda"
        self._casts: dict[int, torch.Tensor] = {}

    def forget(self) -> None:
        """Drop the casts of weights, as torch does at the end of autocast."""
        self._casts.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.is_autocast_enabled("cpu"):
            self.forget()
        else:
            if func in LOWERED:
                args, kwargs = self._cast(args, kwargs, torch.get_autocast_dtype("cpu"))
            elif self._cuda and func in RAISED_ON_CUDA:
                args, kwargs = self._cast(args, kwargs, torch.float32)
        if getattr(func, "__module__", "") == "torch.nn.init" and (target := (*args, *kwargs.values())[0]).is_meta:
            return target  # there are no numbers to draw
        if func is torch.Tensor.backward:
            return self._backward(args[0])
        if func is functional.dropout and self._cuda:
            return _dropout(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        return func(*args, **kwargs)

    def _backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass with this mode on.

        Torch turns a mode off while it runs the mode's own code, but checkpointing reruns the model there.
        """
        run = torch.autograd.graph._engine_run_backward
        gradient = torch.ones_like(loss)
        with self:
            run((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)

    def _cast(self, args: tuple[Any, ...], kwargs: dict[str, Any], to: torch.dtype) -> tuple[Any, dict[str, Any]]:
        return tuple(self._as(a, to) for a in args), {n: self._as(a, to) for n, a in kwargs.items()}

    def _as(self, value: Any, to: torch.dtype) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_meta or value.dtype is to:
            return value
        if not value.is_floating_point():
            return value
        if not (value.is_leaf and value.requires_grad and value.dtype is torch.float32):
            return value.to(to)
        if id(value) not in self._casts:
            self._casts[id(value)] = value.to(to)
        return self._casts[id(value)]

    def _attend(self, q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, **kwargs: Any) -> Any:
        """Apply attention with the kernel that torch would choose.

        Three cases have only the kernel that materialises the scores. On a GPU: float32 with grouped heads. On any
        device: keys with fewer heads without `enable_gqa` (falcon), because torch's fused kernels require equal heads.
        On a CPU: dropout, or a bias that requires a gradient (T5's), which torch's sdp_utils_cpp rejects.
        """
        if not q.is_meta:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, **kwargs)
        grouped = bool(kwargs.get("enable_gqa"))
        learned = attn_mask is not None and attn_mask.requires_grad
        plain = not self._cuda and (learned or dropout_p > 0)
        if plain or ((self._cuda and q.dtype is torch.float32) if grouped else k.shape[1] != q.shape[1]):
            return torch.ops.aten._scaled_dot_product_attention_math(
                q,
                k,
                v,
                attn_mask,
                dropout_p if plain else 0.0,
                is_causal=kwargs.get("is_causal", False),
                enable_gqa=grouped,
            )[0]
        bias = attn_mask
        if bias is not None and bias.dtype is torch.bool:
            bias = q.new_empty(bias.shape)
        if self._cuda and bias is not None and attn_mask.is_floating_point():
            bias = _aligned(bias)
        return _Attention.apply(q, k, v, bias, self._cuda)  # type: ignore[no-untyped-call]


def _aligned(bias: Any) -> Any:
    """Return the bias in the alignment that the memory-efficient kernel requires (torch's `preprocess_mask`).

    The kernel copies a bias if its rows are not contiguous, or if a stride is not a multiple of 8 elements.
    """
    *rows, last = bias.stride()
    if last == 1 and not any(step % 8 for step in rows):
        return bias
    return functional.pad(bias, (0, 8 - bias.shape[-1] % 8))[..., : bias.shape[-1]]


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Apply dropout as a GPU does: the mask has one byte per element; elsewhere it has the input's own type."""
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


@contextlib.contextmanager
def one_autocast() -> Iterator[None]:
    """Report the CPU's autocast to callers that ask for the GPU's, as peft does over a quantised base."""
    enabled: Any = torch.is_autocast_enabled
    with mock.patch("torch.is_autocast_enabled", lambda kind="cuda": enabled("cpu" if kind == "cuda" else kind)):
        yield


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Make AdamW's fused and foreach kernels and checkpointing accept the meta device."""
    devices = ["cuda", "cpu", "meta"]
    optimizer = "torch.optim.optimizer._get_{}_kernels_supported_devices"
    infer: Any = torch.utils.checkpoint._infer_device_type

    def device_type(*args: Any) -> str:
        device = str(infer(*args))
        return "cpu" if device == "meta" else device

    with contextlib.ExitStack() as patches:
        for kind in ("fused", "foreach"):
            patches.enter_context(mock.patch(optimizer.format(kind), side_effect=lambda: list(devices)))
        patches.enter_context(mock.patch("torch.utils.checkpoint._infer_device_type", device_type))
        yield

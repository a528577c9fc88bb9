"""Tensors that each of transformers' activations (`ACT2FN`) saves for backward, by torch's derivatives.yaml.

An activation with its own kernel saves its input or its output. The others are written in Python, and each of their
operations saves something.
"""

from collections.abc import Callable, Mapping

from broker.estimator.memory.simulator.tape import Tape, Tensor

KEEPS_INPUT = frozenset({
    "gelu", "gelu_pytorch_tanh", "hardswish", "leaky_relu", "mish", "relu6", "silu", "swish",
})  # fmt: skip
KEEPS_OUTPUT = frozenset({"relu", "sigmoid", "tanh"})


def activate(tape: Tape, x: Tensor, kind: str, *, autocast: bool) -> Tensor:
    """Return the activation of `x`, which the caller still holds.

    `autocast`: powers, softplus and exponentials are computed in float32.
    """
    if kind in KEEPS_INPUT:
        return tape.op([x], x.count, x.width, saves=[x])
    if kind in KEEPS_OUTPUT:
        return tape.op([x], x.count, x.width, saves_out=True)
    return WRITTEN[kind](tape, x, 4 if autocast else x.width)


def _plain(tape: Tape, x: Tensor) -> Tensor:
    """Add or multiply by a constant; nothing is saved."""
    return tape.op([x], x.count, x.width)


def _shifted(tape: Tape, x: Tensor) -> Tensor:
    """Add a constant to `x` and release it; the gradient passes through unchanged."""
    return tape.after(x, tape.op([x], x.count, x.width, passthrough_grad=True))


def _scaled(tape: Tape, x: Tensor) -> Tensor:
    """Multiply `x` by a constant and release it."""
    return tape.after(x, _plain(tape, x))


def _bent(tape: Tape, x: Tensor) -> Tensor:
    """Compute the hyperbolic tangent of `x`, which saves its result, and release `x`."""
    return tape.after(x, tape.op([x], x.count, x.width, saves_out=True))


def _as_wide(tape: Tape, x: Tensor, width: int) -> Tensor:
    if x.width != width:
        return tape.op([x], x.count, width)
    x.retain()
    return x


def _error(tape: Tape, x: Tensor) -> Tensor:
    """Compute the error function. Its derivative is one expression of four operations that are all freed at its end."""
    return tape.op([x], x.count, x.width, saves=[x], back=4 * x.size)


def _times(tape: Tape, x: Tensor, y: Tensor) -> Tensor:
    """Multiply `x` by `y` and release both."""
    result = tape.product(x, y)
    tape.drop(x, y)
    return result


def _gelu_new(tape: Tape, x: Tensor, wide: int) -> Tensor:
    half, raised = _plain(tape, x), _as_wide(tape, x, wide)
    cube = tape.after(raised, tape.op([raised], x.count, wide, saves=[raised], back=2 * raised.size))
    small = _scaled(tape, cube)
    added = tape.after(small, tape.op([x, small], x.count, small.width, passthrough_grad=True))
    return _times(tape, half, _shifted(tape, _bent(tape, _scaled(tape, added))))


def _gelu_fast(tape: Tape, x: Tensor, wide: int) -> Tensor:
    half, long, short = _plain(tape, x), _plain(tape, x), _plain(tape, x)
    square = tape.after(short, tape.product(short, x))
    inner = _times(tape, long, _shifted(tape, square))
    return _times(tape, half, _shifted(tape, _bent(tape, inner)))


def _gelu_python(tape: Tape, x: Tensor, wide: int) -> Tensor:
    half, part = _plain(tape, x), _plain(tape, x)
    error = tape.after(part, _error(tape, part))
    return _times(tape, half, _shifted(tape, error))


def _gelu_clipped(tape: Tape, x: Tensor, wide: int) -> Tensor:
    bent = tape.op([x], x.count, x.width, saves=[x])
    return tape.after(bent, tape.op([bent], x.count, x.width, saves=[bent]))


def _gelu_quick(tape: Tape, x: Tensor, wide: int) -> Tensor:
    gate = _bent(tape, _plain(tape, x))
    return tape.after(gate, tape.product(x, gate))


def _laplace(tape: Tape, x: Tensor, wide: int) -> Tensor:
    part = _scaled(tape, tape.op([x], x.count, x.width, passthrough_grad=True))
    error = tape.after(part, _error(tape, part))
    return _scaled(tape, _shifted(tape, error))


def _linear(tape: Tape, x: Tensor, wide: int) -> Tensor:
    return _as_wide(tape, x, x.width)


def _prelu(tape: Tape, x: Tensor, wide: int) -> Tensor:
    """Compute PReLU, whose backward kernel makes a gradient of the slope for each element."""
    return tape.op([x], x.count, x.width, saves=[x], back=x.size)


def _relu_squared(tape: Tape, x: Tensor, wide: int) -> Tensor:
    positive = tape.op([x], x.count, x.width, saves_out=True)
    raised = tape.after(positive, _as_wide(tape, positive, wide))
    return tape.after(raised, tape.op([raised], x.count, wide, saves=[raised], back=2 * raised.size))


def _root_of_softplus(tape: Tape, x: Tensor, wide: int) -> Tensor:
    raised = _as_wide(tape, x, wide)
    soft = tape.after(raised, tape.op([raised], x.count, wide, saves=[raised]))
    return tape.after(soft, tape.op([soft], x.count, wide, saves_out=True, back=soft.size))


def _xielu(tape: Tape, x: Tensor, wide: int) -> Tensor:
    """Compute xIELU, whose two slopes are trained and pass through softplus. Frozen slopes would save a little less."""
    above = tape.op([x], x.count, wide)
    square = tape.after(above, tape.product(above, x))
    linear = _plain(tape, x)
    right = tape.op([square, linear], x.count, square.width, passthrough_grad=True)
    tape.drop(square, linear)
    minimum = tape.op([x], x.count, x.width, saves=[x])
    raised = tape.after(minimum, _as_wide(tape, minimum, wide))
    power = tape.after(raised, tape.op([raised], x.count, wide, saves_out=True))
    difference = tape.after(power, tape.op([power, x], x.count, wide, passthrough_grad=True))
    slope, linear = tape.after(difference, tape.op([difference], x.count, wide, saves=[difference])), _plain(tape, x)
    left = tape.op([slope, linear], x.count, wide, passthrough_grad=True)
    tape.drop(slope, linear)
    where = tape.new(x.count, 1)
    result = tape.op([right, left], x.count, wide, saves=[where])
    tape.drop(right, left, where)
    return result


WRITTEN: Mapping[str, Callable[[Tape, Tensor, int], Tensor]] = {
    "gelu_new": _gelu_new, "gelu_python_tanh": _gelu_new, "gelu_accurate": _gelu_new, "gelu_fast": _gelu_fast,
    "gelu_python": _gelu_python, "gelu_10": _gelu_clipped, "quick_gelu": _gelu_quick, "laplace": _laplace,
    "linear": _linear, "prelu": _prelu, "relu2": _relu_squared, "sqrtsoftplus": _root_of_softplus, "xielu": _xielu,
}  # fmt: skip

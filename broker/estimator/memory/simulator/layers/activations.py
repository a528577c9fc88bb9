"""Tensors that each of transformers' activations (`ACT2FN`) saves for backward, by torch's derivatives.yaml.

An activation with its own kernel saves its input or its output. The others are written in Python, and each of their
operations saves something.
"""

from collections.abc import Callable, Mapping

from broker.estimator.memory.simulator.tape import Tape
from broker.estimator.memory.simulator.tensors import Tensor

KEEPS_INPUT = frozenset({
    "gelu", "gelu_pytorch_tanh", "hardswish", "leaky_relu", "mish", "relu6", "silu", "swish",
})  # fmt: skip
KEEPS_OUTPUT = frozenset({"relu", "sigmoid", "tanh"})


def activate(tape: Tape, x: Tensor, kind: str, *, autocast: bool) -> Tensor:
    """Return the activation of `x`, which the caller still holds.

    `autocast`: powers, softplus and exponentials are computed in float32.
    """
    if kind in KEEPS_INPUT:
        return tape.elementwise(x)
    if kind in KEEPS_OUTPUT:
        return tape.elementwise_by_result(x)
    return WRITTEN[kind](tape, x, 4 if autocast else x.width)


def _shifted(tape: Tape, x: Tensor) -> Tensor:
    """Add a constant to `x` and release it; the gradient passes through unchanged."""
    return tape.after(x, tape.add(x))


def _scaled(tape: Tape, x: Tensor) -> Tensor:
    """Multiply `x` by a constant and release it."""
    return tape.after(x, tape.scale(x))


def _bent(tape: Tape, x: Tensor) -> Tensor:
    """Compute the hyperbolic tangent of `x`, which saves its result, and release `x`."""
    return tape.after(x, tape.elementwise_by_result(x))


def _error(tape: Tape, x: Tensor) -> Tensor:
    """Compute the error function. Its derivative is one expression of four operations that are all freed at its end."""
    return tape.elementwise(x, back=4 * x.size)


def _times(tape: Tape, x: Tensor, y: Tensor) -> Tensor:
    """Multiply `x` by `y` and release both."""
    result = tape.product(x, y)
    tape.drop(x, y)
    return result


def _gelu_new(tape: Tape, x: Tensor, wide: int) -> Tensor:
    half, raised = tape.scale(x), tape.cast(x, wide)
    cube = tape.after(raised, tape.elementwise(raised, back=2 * raised.size))
    small = _scaled(tape, cube)
    added = tape.after(small, tape.add(x, small))
    return _times(tape, half, _shifted(tape, _bent(tape, _scaled(tape, added))))


def _gelu_fast(tape: Tape, x: Tensor, wide: int) -> Tensor:
    half, long, short = tape.scale(x), tape.scale(x), tape.scale(x)
    square = tape.after(short, tape.product(short, x))
    inner = _times(tape, long, _shifted(tape, square))
    return _times(tape, half, _shifted(tape, _bent(tape, inner)))


def _gelu_python(tape: Tape, x: Tensor, wide: int) -> Tensor:
    half, part = tape.scale(x), tape.scale(x)
    error = tape.after(part, _error(tape, part))
    return _times(tape, half, _shifted(tape, error))


def _gelu_clipped(tape: Tape, x: Tensor, wide: int) -> Tensor:
    bent = tape.elementwise(x)
    return tape.after(bent, tape.elementwise(bent))


def _gelu_quick(tape: Tape, x: Tensor, wide: int) -> Tensor:
    gate = _bent(tape, tape.scale(x))
    return tape.after(gate, tape.product(x, gate))


def _laplace(tape: Tape, x: Tensor, wide: int) -> Tensor:
    part = _scaled(tape, tape.add(x))
    error = tape.after(part, _error(tape, part))
    return _scaled(tape, _shifted(tape, error))


def _linear(tape: Tape, x: Tensor, wide: int) -> Tensor:
    return tape.cast(x, x.width)


def _prelu(tape: Tape, x: Tensor, wide: int) -> Tensor:
    """Compute PReLU, whose backward kernel makes a gradient of the slope for each element."""
    return tape.elementwise(x, back=x.size)


def _relu_squared(tape: Tape, x: Tensor, wide: int) -> Tensor:
    positive = tape.elementwise_by_result(x)
    raised = tape.after(positive, tape.cast(positive, wide))
    return tape.after(raised, tape.elementwise(raised, back=2 * raised.size))


def _root_of_softplus(tape: Tape, x: Tensor, wide: int) -> Tensor:
    raised = tape.cast(x, wide)
    soft = tape.after(raised, tape.elementwise(raised))
    return tape.after(soft, tape.elementwise_by_result(soft, back=soft.size))


def _xielu(tape: Tape, x: Tensor, wide: int) -> Tensor:
    """Compute xIELU, whose two slopes are trained and pass through softplus. Frozen slopes would save a little less."""
    above = tape.resize(x, x.count, wide)
    square = tape.after(above, tape.product(above, x))
    linear = tape.scale(x)
    right = tape.add(square, linear)
    tape.drop(square, linear)
    minimum = tape.elementwise(x)
    raised = tape.after(minimum, tape.cast(minimum, wide))
    power = tape.after(raised, tape.elementwise_by_result(raised))
    difference = tape.after(power, tape.add(power, x))
    slope, linear = tape.after(difference, tape.elementwise(difference)), tape.scale(x)
    left = tape.add(slope, linear)
    tape.drop(slope, linear)
    where = tape.new(x.count, 1)
    result = tape.where(where, right, left)
    tape.drop(right, left, where)
    return result


WRITTEN: Mapping[str, Callable[[Tape, Tensor, int], Tensor]] = {
    "gelu_new": _gelu_new, "gelu_python_tanh": _gelu_new, "gelu_accurate": _gelu_new, "gelu_fast": _gelu_fast,
    "gelu_python": _gelu_python, "gelu_10": _gelu_clipped, "quick_gelu": _gelu_quick, "laplace": _laplace,
    "linear": _linear, "prelu": _prelu, "relu2": _relu_squared, "sqrtsoftplus": _root_of_softplus, "xielu": _xielu,
}  # fmt: skip

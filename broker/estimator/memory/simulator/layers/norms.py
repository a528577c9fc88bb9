"""Norms: the tensors that each kind makes and saves. The caller of a function still holds `x`."""

from broker.estimator.memory.simulator.tape import Tape
from broker.estimator.memory.simulator.tensors import Tensor, Weight


def layer_norm(tape: Tape, x: Tensor, weight: Weight, rows: int, *, autocast: bool) -> Tensor:
    """Apply torch's LayerNorm, in float32 under autocast."""
    wide = tape.cast(x, 4) if autocast else tape.hold(x)
    return tape.after(wide, tape.layer_norm(wide, weight, rows))


def rms_norm(tape: Tape, x: Tensor, weight: Weight, rows: int) -> Tensor:
    """Apply Llama's norm, which divides by the root mean square in float32, casts back and multiplies by the weight."""
    normal = _divided_by_root(tape, x, rows)
    narrow, width = tape.after(normal, tape.cast(normal, x.width)), max(x.width, weight.width)
    # the weight's gradient before it is summed, or the input's before it is cast
    has_wide_gradient = weight.trained or narrow.width < width
    back = x.count * width if has_wide_gradient else 0
    return tape.after(narrow, tape.scale_by_weight(narrow, weight, width, back=back))


def gemma_norm(tape: Tape, x: Tensor, weight: Weight, rows: int) -> Tensor:
    """Apply Gemma's norm, which multiplies by one plus the weight in float32 and casts back."""
    with tape.scope(_divided_by_root(tape, x, rows), tape.new(weight.count, 4)) as variables:
        normal, factor = variables.tensors
        scaled = variables.hold(tape.scale_by_weight(normal, weight, 4, factor=factor))
        return tape.cast(scaled, x.width)


def olmo_norm(tape: Tape, x: Tensor, weight: Weight, rows: int) -> Tensor:
    """Apply OLMo 2's norm, which multiplies by the weight in float32 and casts back."""
    back = x.count * 4 if weight.trained else 0
    with tape.scope(_divided_by_root(tape, x, rows)) as variables:
        (normal,) = variables.tensors
        scaled = variables.hold(tape.scale_by_weight(normal, weight, 4, back=back))
        return tape.cast(scaled, x.width)


def cohere_norm(tape: Tape, x: Tensor, weight: Weight, rows: int) -> Tensor:
    """Apply Cohere's norm, which computes a layer norm in float32 and subtracts the mean twice."""
    back = x.count * 4 if weight.trained else 0
    with tape.scope() as variables:
        wide = tape.cast(x, 4)
        mean = variables.hold(tape.resize(wide, rows))
        centred = tape.add(wide, mean)
        squares = tape.after(centred, tape.elementwise(centred, back=2 * x.count * 4))
        root = variables.hold(tape.after(squares, tape.resize(squares, rows)))
        centred = tape.add(wide, mean)
        normal = variables.hold(tape.after(centred, tape.bilinear(centred, root, x.count, back=x.count * 4)))
        tape.drop(wide)
        copy = None if weight.width == 4 else variables.hold(tape.new(weight.count, 4))
        scaled = variables.hold(tape.scale_by_weight(normal, weight, 4, factor=copy, back=back))
        return tape.cast(scaled, x.width)


def t5_norm(tape: Tape, x: Tensor, weight: Weight, rows: int) -> Tensor:
    """Apply T5's norm, which divides by the root mean square and does not cast `x` for the scaling."""
    wide = tape.cast(x, 4)
    squares = tape.after(wide, tape.elementwise(wide, back=2 * x.count * 4))
    root = tape.after(squares, tape.root_mean(squares, rows))
    normal = tape.after(root, tape.bilinear(x, root, x.count, back=x.count * 4))
    narrow = tape.after(normal, tape.cast(normal, weight.width))
    back = x.count * narrow.width if weight.trained else 0
    return tape.after(narrow, tape.scale_by_weight(narrow, weight, weight.width, back=back))


def _divided_by_root(tape: Tape, x: Tensor, rows: int) -> Tensor:
    """Return `x` divided by the root mean square of each row, in float32."""
    with tape.scope(tape.cast(x, 4)) as variables:
        (wide,) = variables.tensors
        squares = tape.elementwise(wide, back=2 * x.count * 4)
        root = variables.hold(tape.after(squares, tape.resize(squares, rows)))
        return tape.bilinear(wide, root, x.count, back=x.count * 4)

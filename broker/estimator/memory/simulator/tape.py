"""Tape of the allocations and frees of a training step, by eager PyTorch's rules, with sizes in place of tensors.

A tensor lives while Python or the autograd graph holds it. The backward pass runs the tape in reverse. A node's input
gradients are made while its own gradient and saved tensors still live. As in autograd's input buffer, a tensor's second
gradient is added in place if the first has no other holder and is not a view.
"""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from broker.estimator.memory.simulator.tensors import CATEGORIES, Category, Tensor, Weight


class Derivative(NamedTuple):
    """Needs of the backward pass of an operation, which autograd stores in its node."""

    saved: Sequence[Tensor] = ()
    """Tensors that are held until the backward pass of the operation has run."""
    saves_result: bool = False
    """The result is saved too."""
    saves_statistics: bool = False
    """Some of `saved` are made by the operation itself, such as a dropout mask."""
    weights: Sequence[tuple[Weight, int]] = ()
    """Trained weights, and the width that each gradient is computed in."""
    kernel_bytes: int = 0
    """Temporary bytes of the backward kernel."""
    passes_gradient: bool = False
    """An input of the result's size and type shares the result's gradient, instead of getting a new tensor."""
    is_matrix: bool = False
    """A product of flattened rows, which saves its matrix and whose gradients are views."""


class _Node(NamedTuple):
    """An operation in the autograd graph."""

    outs: Sequence[Tensor]
    inputs: Sequence[Tensor]
    saved: Sequence[Tensor]
    derivative: Derivative

    @property
    def needs_saved(self) -> bool:
        """Return whether the backward pass needs a weight or a tensor that the forward pass saved."""
        return bool(self.saved or self.derivative.weights or self.derivative.is_matrix)


class TensorScope:
    """Tensors in the Python variables of a function: `with tape.scope(x) as variables` drops them at its end."""

    def __init__(self, tape: "Tape", *tensors: Tensor) -> None:
        self._tape, self.tensors = tape, list(tensors)

    def hold(self, tensor: Tensor) -> Tensor:
        """Return the tensor, whose holder is the scope from now on."""
        self.tensors.append(tensor)
        return tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._tape.drop(*self.tensors)


class Tape:
    """Sums the live bytes by category; `peaks` has the worst moment of every segment."""

    def __init__(self) -> None:
        self.live: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self.total = 0
        self.peaks: dict[str, tuple[int, dict[Category, int]]] = {}
        self.category: Category = "activations"
        self.whole: Category = "gradients"
        """Category of unsharded gradients of weights."""
        self.recording = True
        self.unpacks = False
        """Checkpointing's hooks hand recorded tensors to their derivatives."""
        self.nodes: list[_Node] = []
        self.operations = 0
        self.last_saving = 0
        """Number of the last operation that saves a tensor."""
        self.stop: int | None = None
        """Number of the operation at which recomputation stops; None: it does not stop. Checkpointing stops once all
        saved tensors exist again, which is before the last saving operation has run.
        """
        self._segment = ""
        self._worst = 0

    def begin_segment(self, segment: str, category: Category) -> None:
        """Begin a segment; its allocations have this category."""
        self._segment, self.category = segment, category
        self._worst = self.peaks[segment][0] if segment in self.peaks else -1
        self._mark()

    def _mark(self) -> None:
        if self.total > self._worst:
            self._worst = self.total
            self.peaks[self._segment] = self.total, dict(self.live)

    def adjust(self, category: Category, size: int) -> None:
        """Count bytes that come or go without a tensor of their own."""
        self.live[category] += size
        self.total += size
        self._mark()

    def repeat(self, by: Mapping[Category, int], times: int) -> None:
        """Count bytes that come and go `times` times. No peak is recorded, because other segments cover them."""
        for category, size in by.items():
            self.live[category] += size * times
            self.total += size * times

    def new(self, count: int, width: int, *, grad: bool = False, category: Category | None = None) -> Tensor:
        """Allocate a tensor that its maker holds."""
        tensor = Tensor(count, width, category or self.category, grad)
        self.adjust(tensor.category, tensor.size)
        return tensor

    def drop(self, *tensors: Tensor) -> None:
        """Remove a holder of each tensor, and free those without any."""
        for tensor in tensors:
            t = tensor.base or tensor
            t.refs -= 1
            if not t.refs:
                self.live[t.category] -= t.size
                self.total -= t.size

    def after(self, before: Tensor, result: Tensor) -> Tensor:
        """Return `result`, the result computed from `before`, and release `before`."""
        self.drop(before)
        return result

    def scope(self, *tensors: Tensor) -> TensorScope:
        """Return a scope that drops these tensors, and those that it is given to hold, when its block ends."""
        return TensorScope(self, *tensors)

    def _record(
        self, inputs: Sequence[Tensor], count: int, width: int, derivative: Derivative, scratch: int = 0
    ) -> Tensor:
        """Record an operation and return its result. `scratch`: temporary bytes of the forward kernel."""
        saved, saves_result, saves_statistics, weights = derivative[:4]
        grad = bool(weights) or any(t.grad for t in inputs)
        self.operations += 1
        if grad and (saved or weights or saves_result or derivative.is_matrix):
            self.last_saving = self.operations + (saves_result or saves_statistics)
        if self.stop is not None and self.operations >= self.stop:
            out = Tensor(count, width, self.category, grad)
            out.size = 0
        else:
            self.adjust("temporary", scratch)
            out = self.new(count, width, grad=grad)
            self.adjust("temporary", -scratch)
        if grad and self.recording:
            saved = (*saved, out) if saves_result else saved
            for t in saved:
                t.retain()
            self.nodes.append(_Node((out,), inputs, saved, derivative))
        return out

    def hold(self, x: Tensor) -> Tensor:
        """Return `x` with one more holder."""
        x.retain()
        return x

    def scale(self, x: Tensor) -> Tensor:
        """Multiply by a constant, or copy. Saves nothing."""
        return self._record([x], x.count, x.width, Derivative())

    def cast(self, x: Tensor, width: int) -> Tensor:
        """Cast to that width; saves nothing. A tensor of that width is returned itself, with one more holder."""
        if x.width != width:
            return self._record([x], x.count, width, Derivative())
        return self.hold(x)

    def resize(self, x: Tensor, count: int, width: int | None = None, *, back: int = 0) -> Tensor:
        """Copy to another number of elements: expand, pad, select or sum. Saves nothing.

        `width`: that of the result; None: that of `x`. `back`: temporary bytes of the backward pass.
        """
        return self._record([x], count, width or x.width, Derivative(kernel_bytes=back))

    def kernel(self, x: Tensor, count: int, width: int, *, scratch: int, back: int) -> Tensor:
        """Run an operation that saves nothing. `scratch`, `back`: temporary bytes of its forward and backward pass."""
        return self._record([x], count, width, Derivative(kernel_bytes=back), scratch)

    def add(self, x: Tensor, *terms: Tensor, width: int | None = None) -> Tensor:
        """Add the terms, or a constant, to `x`. Saves nothing; terms of the sum's type and size share its gradient.

        `width`: that of the sum; None: that of the widest term.
        """
        width = width or max(t.width for t in (x, *terms))
        return self._record([x, *terms], x.count, width, Derivative(passes_gradient=True))

    def add_weight(self, x: Tensor, weight: Weight, width: int) -> Tensor:
        """Add a weight to `x`. Saves nothing. `width`: that in which the weight's gradient is computed."""
        trained = Derivative(weights=_trained(weight, width), passes_gradient=True)
        return self._record([x], x.count, x.width, trained)

    def add_in_place(self, into: Tensor, more: Tensor) -> Tensor:
        """Add `more` in place to some rows of `into`, and return `into` for its holder (index_add).

        Saves `more` until the backward pass of this operation has run.
        """
        out = Tensor(into.count, into.width, into.category, into.grad or more.grad, base=into.base or into)
        self.operations += 1
        if out.grad and self.recording:
            more.retain()
            self.nodes.append(_Node((out,), (into, more), (more,), Derivative(saved=(more,), passes_gradient=True)))
            self.last_saving = self.operations
        return out

    def elementwise(self, x: Tensor, *others: Tensor, back: int = 0) -> Tensor:
        """Apply a function whose derivative needs its first input, such as SiLU, GELU or a power.

        Saves `x` until the backward pass of this operation has run. `back`: temporary bytes of that pass.
        """
        return self._record([x, *others], x.count, x.width, Derivative(saved=[x], kernel_bytes=back))

    def elementwise_by_result(self, x: Tensor, width: int | None = None, *, back: int = 0) -> Tensor:
        """Apply a function whose derivative needs its result, such as ReLU, tanh or softmax.

        Saves the result until the backward pass of this operation has run. `back`: temporary bytes of that pass.
        """
        return self._record([x], x.count, width or x.width, Derivative(saves_result=True, kernel_bytes=back))

    def root_mean(self, squares: Tensor, rows: int) -> Tensor:
        """Return the reciprocal root of each row's mean. Saves the result, which its derivative needs."""
        return self._record([squares], rows, squares.width, Derivative(saves_result=True))

    def where(self, mask: Tensor, *choices: Tensor) -> Tensor:
        """Choose between tensors or constants by element. Saves the mask alone."""
        x = choices[0]
        return self._record(choices, x.count, x.width, Derivative(saved=[mask]))

    def dropout(self, x: Tensor, mask_width: int) -> Tensor:
        """Apply dropout. Makes a mask, and saves the mask alone until the backward pass of this operation has run."""
        with self.scope(self.new(x.count, mask_width)) as variables:
            return self._record([x], x.count, x.width, Derivative(saved=variables.tensors, saves_statistics=True))

    def lookup(self, table: Weight, count: int, width: int | None = None, *, indices: Sequence[Tensor] = ()) -> Tensor:
        """Look up rows of a table. Saves the indices if the table is trained.

        `width`: that in which the table's gradient is computed; None: that of the table.
        """
        trained = Derivative(saved=indices, weights=_trained(table, width or table.width))
        return self._record((), count, table.width, trained)

    def linear(self, x: Tensor, matrix: Weight, count: int, cast: Tensor | None = None) -> Tensor:
        """Multiply flattened rows by a matrix; gradients are views of products.

        Saves `x` if the matrix is trained, and `cast`, autocast's copy of the matrix.
        """
        saved, trained = _product_needs(x, matrix, cast), _trained(matrix, x.width)
        return self._record([x], count, x.width, Derivative(saved=saved, weights=trained, is_matrix=True))

    def convolution(self, x: Tensor, kernel: Weight, count: int, cast: Tensor | None = None) -> Tensor:
        """Convolve `x`. Saves the same as `linear`; gradients are tensors of their own."""
        saved = _product_needs(x, kernel, cast)
        return self._record([x], count, x.width, Derivative(saved=saved, weights=_trained(kernel, x.width)))

    def scale_by_weight(
        self, x: Tensor, weight: Weight, width: int, *, factor: Tensor | None = None, back: int = 0
    ) -> Tensor:
        """Multiply rows by a vector. Saves `x` if the vector is trained, and `factor`, the tensor made of the vector.

        `width`: that of the result. `back`: temporary bytes of the backward pass.
        """
        saved = _product_needs(x, weight, factor)
        derivative = Derivative(saved=saved, weights=_trained(weight, weight.grad_width), kernel_bytes=back)
        return self._record([x], x.count, width, derivative)

    def layer_norm(self, x: Tensor, weight: Weight, rows: int) -> Tensor:
        """Normalise `rows` rows. Saves `x`, and the mean and deviation of each row in float32."""
        with self.scope(self.new(rows * 2, 4)) as variables:
            saved = [x, *variables.tensors]
            trained = Derivative(saved=saved, weights=_trained(weight, weight.grad_width), saves_statistics=True)
            return self._record([x], x.count, x.width, trained)

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the elementwise product of two tensors. Saves each of them if the other requires a gradient.

        The gradient is as wide as the result, and still lives while it is cast (`validate_outputs` in torch's
        engine.cpp). So does the saved tensor, unless checkpointing's hooks hand it out; then it is freed before.
        """
        saved = [tensor for tensor, other in ((x, y), (y, x)) if other.grad]
        width = max(x.width, y.width)
        cast = sum(t.count * (width - t.width * self.unpacks) for t in (x, y) if t.grad and t.width < width)
        return self._record([x, y], x.count, width, Derivative(saved=saved, kernel_bytes=cast))

    def bilinear(self, x: Tensor, y: Tensor, count: int, *, back: int = 0) -> Tensor:
        """Multiply two tensors. Saves those that the other's gradient needs. `back`: temporary bytes of that pass."""
        saved = [tensor for tensor, other in ((x, y), (y, x)) if other.grad]
        return self._record([x, y], count, max(x.width, y.width), Derivative(saved=saved, kernel_bytes=back))

    def route(self, x: Tensor, count: int, *, trained: bool) -> Tensor:
        """Score the experts of each token: a product and its softmax, which is saved. Saves `x` too if trained."""
        return self._record([x], count, 4, Derivative(saved=[x] if trained else [], saves_result=True))

    def fused_attention(self, heads: Sequence[Tensor], masks: Sequence[Tensor], sums: int, back: int) -> Tensor:
        """Apply a fused attention kernel to queries, keys and values.

        Saves queries, keys, values, the masks, the result, and the softmax's sums in float32. `sums`: number of sums.
        `back`: temporary bytes of the backward pass.
        """
        inputs, (q, *_) = [*heads, *masks], heads
        with self.scope(self.new(sums, 4)) as variables:
            derivative = Derivative(saved=[*inputs, *variables.tensors], saves_result=True, kernel_bytes=back)
            return self._record(inputs, q.count, q.width, derivative)

    def split(self, whole: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Return adjacent views of one tensor; holding one holds the whole. Their gradients are joined into one."""
        views = []
        for count in counts:
            view = Tensor(count, whole.width, whole.category, whole.grad, base=whole)
            whole.retain()
            views.append(view)
        if whole.grad and self.recording:
            self.nodes.append(_Node(views, (whole,), (), Derivative()))
        return views

    def backward(self, until: int = 0) -> None:
        """Run the backward pass down to the node of that number. The gradient of the last tensor must have been set."""
        while len(self.nodes) > until:
            self._back(self.nodes.pop())

    def backward_until_saved(self) -> None:
        """Run the backward pass to the first node that needs a weight or a tensor that a forward pass saved."""
        while self.nodes and not self.nodes[-1].needs_saved:
            self._back(self.nodes.pop())

    def _back(self, node: _Node) -> None:
        gradients = [t.gradient for t in node.outs if t.gradient is not None]
        for t in node.outs:
            t.gradient = None
        if not gradients:
            self.drop(*node.saved)
            return
        derivative, kernel_bytes = node.derivative, node.derivative.kernel_bytes
        if kernel_bytes:
            self.adjust("temporary", kernel_bytes)
        input_gradients = [(t, self._towards(t, gradients[0], derivative)) for t in node.inputs if t.grad]
        weight_gradients = [(w, self._computed(w, width)) for w, width in derivative.weights]
        if kernel_bytes:
            self.adjust("temporary", -kernel_bytes)
        self.drop(*node.saved, *gradients)
        for w, gradient in weight_gradients:
            self._store_gradient(w, gradient, view=derivative.is_matrix)
        for t, gradient in input_gradients:
            self._accumulate(t, gradient)

    def _towards(self, t: Tensor, gradient: Tensor, derivative: Derivative) -> Tensor:
        if derivative.passes_gradient and (t.width, t.count) == (gradient.width, gradient.count):
            gradient.retain()
            return gradient
        input_gradient = self.new(t.count, t.width)
        input_gradient.alias = derivative.is_matrix
        return input_gradient

    def _accumulate(self, t: Tensor, gradient: Tensor) -> None:
        first = t.gradient
        if first is None:
            t.gradient = gradient
        elif first.refs == 1 and not first.alias:
            self.drop(gradient)
        else:
            t.gradient = self.new(t.count, t.width)
            self.drop(first, gradient)

    def _computed(self, weight: Weight, width: int) -> Tensor:
        is_stored = weight.gradient is None and width == weight.grad_width
        return self.new(weight.count, width, category=self.whole if is_stored else None)

    def _store_gradient(self, weight: Weight, gradient: Tensor, *, view: bool) -> None:
        """Store the gradient in the weight's own type, or add it to the stored one.

        `view`: it is a reshaped product.
        """
        stored = weight.gradient
        if gradient.width != weight.grad_width:
            cast = self.new(weight.count, weight.grad_width, category=self.whole if stored is None else None)
            self.drop(gradient)
            gradient, view = cast, False
        if stored is None:
            weight.gradient, gradient.alias = gradient, view
            return
        if stored.alias:  # a second use in the same pass: autograd adds the two into a new tensor before it keeps it
            self.drop(self.new(weight.count, weight.grad_width))
            stored.alias = False
        self.drop(gradient)


def _trained(weight: Weight, width: int) -> Sequence[tuple[Weight, int]]:
    """Return the weight with the width that its gradient is computed in, unless the weight is frozen."""
    return [(weight, width)] if weight.trained else []


def _product_needs(x: Tensor, weight: Weight, copy: Tensor | None) -> Sequence[Tensor]:
    """Return what the product of `x` and a weight saves: `x` for the weight's gradient, the copy for that of `x`."""
    return [*([] if copy is None else [copy]), *([x] if weight.trained else [])]

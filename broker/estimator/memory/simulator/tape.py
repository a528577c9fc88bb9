"""Tape of the allocations and frees of a training step, by eager PyTorch's rules, with sizes in place of tensors.

A tensor lives while Python or the autograd graph holds it. The backward pass runs the tape in reverse. A node's input
gradients are made while its own gradient and saved tensors still live. A second gradient of a tensor is added in place
if the first has no other holder and is no view, as in autograd's input buffer.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

Category = Literal["weights", "gradients", "optimizer", "activations", "logits", "temporary", "communication"]
CATEGORIES: tuple[Category, ...] = (
    "weights", "gradients", "optimizer", "activations", "logits", "temporary", "communication",
)  # fmt: skip
BLOCK = 512
"""CUDA's caching allocator rounds sizes up to multiples of this many bytes."""


class Tensor:
    """A tensor of `count` elements of `width` bytes; `refs` counts its holders.

    Holding a view holds its `base` instead.
    """

    __slots__ = ("alias", "base", "category", "count", "grad", "gradient", "refs", "size", "width")

    def __init__(self, count: int, width: int, category: Category, grad: bool, base: "Tensor | None" = None) -> None:
        self.count, self.width, self.category, self.grad, self.base = count, width, category, grad, base
        self.size = -(-count * width // BLOCK) * BLOCK
        self.refs = 1
        self.alias = False
        """This gradient is a reshaped product, so autograd adds nothing to it in place."""
        self.gradient: Tensor | None = None

    def retain(self) -> None:
        """Add a holder."""
        (self.base or self).refs += 1


class Weight:
    """A matrix: its type, whether it is trained, and its casts."""

    __slots__ = ("cast", "count", "grad_width", "gradient", "trained", "width")

    def __init__(self, count: int, width: int, *, trained: bool, grad_width: int) -> None:
        self.count, self.width, self.trained, self.grad_width = count, width, trained, grad_width
        self.gradient: Tensor | None = None
        self.cast: Tensor | None = None


class _Node:
    __slots__ = ("back", "inputs", "keeps", "outs", "passes", "saved", "weights")

    def __init__(
        self,
        outs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        saved: Sequence[Tensor],
        weights: Sequence[tuple[Weight, int]],
        back: int,
        passes: bool,
        keeps: bool = False,
    ) -> None:
        self.outs, self.inputs, self.saved, self.weights = outs, inputs, saved, weights
        self.back, self.passes, self.keeps = back, passes, keeps


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
        for given in tensors:
            t = given.base or given
            t.refs -= 1
            if not t.refs:
                self.live[t.category] -= t.size
                self.total -= t.size

    def after(self, before: Tensor, result: Tensor) -> Tensor:
        """Return `result`, the result computed from `before`, and release `before`."""
        self.drop(before)
        return result

    def op(
        self,
        inputs: Sequence[Tensor],
        count: int,
        width: int,
        *,
        saves: Sequence[Tensor] = (),
        weights: Sequence[tuple[Weight, int]] = (),
        scratch: int = 0,
        back: int = 0,
        passthrough_grad: bool = False,
        saves_out: bool = False,
        saves_matrix: bool = False,
        saves_own_output: bool = False,
    ) -> Tensor:
        """Record an operation and return its result.

        `saves`: tensors that its backward pass needs. `weights`: trained weights, and the width that their gradients
        are computed in. `scratch`, `back`: temporary bytes of the forward and the backward kernel. `passthrough_grad`:
        the gradient passes through unchanged if the types agree. `saves_out`: the result is saved too. `saves_matrix`:
        a product of flattened rows, which saves its matrix and whose gradient is a view. `saves_own_output`: some of
        `saves` are the operation's own results.
        """
        grad = bool(weights) or any(t.grad for t in inputs)
        self.operations += 1
        if grad and (saves or weights or saves_out or saves_matrix):
            self.last_saving = self.operations + (saves_out or saves_own_output)
        if self.stop is not None and self.operations >= self.stop:
            out = Tensor(count, width, self.category, grad)
            out.size = 0
        else:
            self.adjust("temporary", scratch)
            out = self.new(count, width, grad=grad)
            self.adjust("temporary", -scratch)
        if grad and self.recording:
            saved = (*saves, out) if saves_out else saves
            for t in saved:
                t.retain()
            self.nodes.append(_Node((out,), inputs, saved, weights, back, passthrough_grad, saves_matrix))
        return out

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the elementwise product of two tensors, each of which is saved for the other's gradient.

        The gradient is as wide as the result, and still lives while it is cast (`validate_outputs` in torch's
        engine.cpp). So does the saved tensor, unless checkpointing's hooks hand it out; then it is freed before.
        """
        saved = [tensor for tensor, other in ((x, y), (y, x)) if other.grad]
        width = max(x.width, y.width)
        cast = sum(t.count * (width - t.width * self.unpacks) for t in (x, y) if t.grad and t.width < width)
        return self.op([x, y], x.count, width, saves=saved, back=cast)

    def added(self, into: Tensor, more: Tensor) -> Tensor:
        """Add `more` in place to some rows of `into`, and return `into` for its holder (index_add).

        Its derivative saves what it adds.
        """
        out = Tensor(into.count, into.width, into.category, into.grad or more.grad, base=into.base or into)
        self.operations += 1
        if out.grad and self.recording:
            more.retain()
            self.nodes.append(_Node((out,), (into, more), (more,), (), 0, True))
            self.last_saving = self.operations
        return out

    def split(self, whole: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Return adjacent views of one tensor; holding one holds the whole. Their gradients are joined into one."""
        views = []
        for count in counts:
            view = Tensor(count, whole.width, whole.category, whole.grad, base=whole)
            whole.retain()
            views.append(view)
        if whole.grad and self.recording:
            self.nodes.append(_Node(views, (whole,), (), (), 0, False))
        return views

    def backward(self, until: int = 0) -> None:
        """Run the backward pass down to the node of that number. The gradient of the last tensor must have been set."""
        while len(self.nodes) > until:
            self._back(self.nodes.pop())

    def backward_until_saved(self) -> None:
        """Run the backward pass to the first node that needs a weight or a tensor that a forward pass saved."""
        while self.nodes and not ((node := self.nodes[-1]).saved or node.weights or node.keeps):
            self._back(self.nodes.pop())

    def _back(self, node: _Node) -> None:
        gradients = [t.gradient for t in node.outs if t.gradient is not None]
        for t in node.outs:
            t.gradient = None
        if not gradients:
            self.drop(*node.saved)
            return
        if node.back:
            self.adjust("temporary", node.back)
        input_gradients = [(t, self._towards(t, gradients[0], node)) for t in node.inputs if t.grad]
        weight_gradients = [(w, self._computed(w, width)) for w, width in node.weights]
        if node.back:
            self.adjust("temporary", -node.back)
        self.drop(*node.saved, *gradients)
        for w, gradient in weight_gradients:
            self._keep(w, gradient, view=node.keeps)
        for t, gradient in input_gradients:
            self._accumulate(t, gradient)

    def _towards(self, t: Tensor, gradient: Tensor, node: _Node) -> Tensor:
        if node.passes and (t.width, t.count) == (gradient.width, gradient.count):
            gradient.retain()
            return gradient
        input_gradient = self.new(t.count, t.width)
        input_gradient.alias = node.keeps
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

    def _keep(self, weight: Weight, gradient: Tensor, *, view: bool) -> None:
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


EARLIER = Tensor(0, 0, "gradients", False)
"""Gradient of an earlier micro-batch, whose bytes are counted elsewhere."""

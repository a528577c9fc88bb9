"""Tensors and weights of a simulated step: sizes and holders in place of values."""

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
    """A parameter of `count` elements: its type, whether it is trained, and its casts."""

    __slots__ = ("cast", "count", "grad_width", "gradient", "trained", "width")

    def __init__(self, count: int, width: int, *, trained: bool, grad_width: int) -> None:
        self.count, self.width, self.trained, self.grad_width = count, width, trained, grad_width
        self.gradient: Tensor | None = None
        self.cast: Tensor | None = None
        """Copy in half precision that autocast keeps until it ends; None: there is none."""


EARLIER = Tensor(0, 0, "gradients", False)
"""Gradient of an earlier micro-batch, whose bytes are counted elsewhere."""

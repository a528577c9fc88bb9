"""Input and result of the simulator."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from broker.estimator.architecture.families import Numerics
from broker.estimator.memory.simulator.loss_forms import TRAINER_LOSS, LossForm
from broker.estimator.memory.simulator.tensors import Category

Bytes = Mapping[Category, int]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step to simulate, in the terms of one device."""

    numerics: Numerics
    rows: int
    length: int
    checkpointing: bool
    target: int = 0
    """Tokens of each row that an encoder-decoder generates."""
    reentrant: bool = False
    """Use the form of checkpointing that recomputes a layer before any of its backward pass."""
    accumulated: bool = False
    """True if gradients of earlier micro-batches exist from the start."""
    optimizer: str = "adamw_fused"
    whole_states: int = 0
    """Weights whose states stay in float32 under an 8-bit optimizer."""
    trained: int | None = None
    """Weights with gradients and states; None: those of the adapters, or all."""
    loss: LossForm = TRAINER_LOSS
    tables: int = 0
    """Bytes of buffers that the model holds in addition to its weights, on every device."""
    shards: int = 1
    """Devices that share one copy of weights, gradients and states (FSDP)."""
    replicas: int = 1
    """Devices or groups of shards that hold a whole copy (DDP)."""
    masters: bool = False
    """Shards are kept in the trained weights' type, and gathered in the compute type."""
    fsdp: Literal[1, 2] = 2
    offload: bool = False
    """Shards of weights, gradients and states are in host memory, and the optimizer steps there."""

    def share(self, size: int) -> int:
        """Return the bytes that one device keeps of `size` bytes."""
        return 0 if self.offload else size // self.shards

    @property
    def divided(self) -> bool:
        """Return whether FSDP 2 shards the model."""
        return self.fsdp == 2 and self.shards > 1

    @property
    def gathered(self) -> "Step":
        """Return the step in the types that one device computes in.

        Under FSDP 2 a full fine-tune has gradients in the type of the gathered weights. New gradients are not added to
        those of earlier micro-batches, because the earlier ones are sharded.
        """
        if not self.divided:
            return self
        n = self.numerics
        return replace(self, numerics=replace(n, trained=n.weight) if n.full else n, accumulated=False)

    @property
    def hooked(self) -> bool:
        """Return whether FSDP 1 hooks on frozen weights hold a layer's inputs until the backward pass ends.

        Reentrant checkpointing makes the inputs leaves, so the hooks hold their gradients too. Every adapter is a unit
        of its own (peft's wrapping policy), so FSDP prefetches an adapter ahead of a layer's pass, not a second layer.
        """
        return self.fsdp == 1 and self.shards > 1 and not self.numerics.full


@dataclass(frozen=True, kw_only=True)
class StepPeak:
    """Bytes by category at the worst moment of each segment."""

    segments: Mapping[str, Bytes]
    trained: int
    """Weights that the optimizer updates."""

    @cached_property
    def worst(self) -> str:
        """Return the name of the segment with the highest peak."""
        return max(self.segments, key=lambda name: sum(self.segments[name].values()))

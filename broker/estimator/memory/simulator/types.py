"""What a step is asked by, and what is answered."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from broker.estimator.architecture.families import Numerics
from broker.estimator.memory.simulator.tape import Category

Bytes = Mapping[Category, int]
Loss = Literal["trainer", "padded", "shifted", "float", "own"]
"""How logits become a loss: the trainer's way, outside the model; or as versions of transformers did inside it: labels
padded; logits raised to float32 and shifted; the raised ones in place of the first; shifted in their own type."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is asked for, in the terms of one device."""

    numerics: Numerics
    rows: int
    length: int
    checkpointing: bool
    target: int = 0
    """Tokens that an encoder-decoder writes in each row."""
    reentrant: bool = False
    """The way of checkpointing that computes a layer again before anything of its backward pass."""
    accumulated: bool = False
    """Gradients of earlier micro-batches are there from the start."""
    optimizer: str = "adamw_fused"
    whole_states: int = 0
    """Weights whose states stay in float32 where others' are of 8 bits."""
    trained: int | None = None
    """Weights that gradients and states are kept for; None: those of the adapters, or all."""
    loss: Loss = "trainer"
    tables: int = 0
    """Bytes of buffers that the model holds beside its weights, on every device."""
    shards: int = 1
    """Devices that weights, gradients and states are divided between (FSDP)."""
    replicas: int = 1
    """Devices that hold everything (DDP)."""
    masters: bool = False
    """Shards are kept in the trained weights' type, and gathered in the compute type."""
    fsdp: Literal[1, 2] = 2
    offload: bool = False
    """Shards of weights, gradients and states are in the host's memory, and the optimizer steps there."""

    def share(self, size: int) -> int:
        """What one device keeps of so many bytes."""
        return 0 if self.offload else size // self.shards

    @property
    def divided(self) -> bool:
        """By FSDP 2."""
        return self.fsdp == 2 and self.shards > 1

    @property
    def gathered(self) -> "Step":
        """As it is computed. By FSDP 2 with whole weights as they are gathered, whose gradients are of their type, and
        added to none: earlier ones are divided.
        """
        if not self.divided:
            return self
        n = self.numerics
        return replace(self, numerics=replace(n, trained=n.weight) if n.full else n, accumulated=False)

    @property
    def hooked(self) -> bool:
        """FSDP 1 over frozen weights: its hooks on a layer's inputs hold these until the backward pass is over, and
        where checkpointing is reentrant, which makes leaves of them, their gradients too. Every adapter is a unit of
        its own (peft's wrapping policy), so what is fetched ahead of a layer's pass is an adapter, no second layer.
        """
        return self.fsdp == 1 and self.shards > 1 and not self.numerics.full


@dataclass(frozen=True, kw_only=True)
class StepPeak:
    """Bytes by category at the worst moment of each segment."""

    segments: Mapping[str, Bytes]
    trained: int
    """Weights that the optimizer updates."""

    @property
    def worst(self) -> str:
        """The segment of the peak."""
        return max(self.segments, key=lambda name: sum(self.segments[name].values()))

"""FSDP 2 beside a step that is played: what torch's `_fsdp_param_group.py` gathers, sends and lets go, and when.

All is counted where Python lets go of it, as the caching allocator does. The layers are a unit each; the root is all
else, which stays whole from before the embeddings to the end of the backward pass.
"""

from dataclasses import dataclass

from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import Numerics, family_spec, layer_matrices
from broker.estimator.architecture.model_states import adapter_parameters, layer_bytes, trained_parameters
from broker.estimator.memory.simulator.tape import Tape
from broker.estimator.memory.simulator.types import Step


class NoSharding:
    """Nothing is gathered: one device, and those whose exchange is added to what was played."""

    def gather_root(self) -> None:
        """Before the embeddings."""

    def gather(self) -> None:
        """Before a layer's forward pass."""

    def let_go(self) -> None:
        """After a layer's forward pass."""

    def leave_root(self) -> None:
        """The model returns its logits."""

    def turn(self) -> None:
        """The logits' gradient is there."""

    def gather_back(self, *, ahead: bool) -> None:
        """Before a layer's backward pass. `ahead`: another comes after it."""

    def reduce(self) -> None:
        """After a layer's backward pass. Where nothing before the first layer wants a gradient, torch reduces that one
        after the root, which takes no more.
        """

    def reduce_root(self) -> None:
        """The backward pass is over."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is gathered and reduced together; bytes."""

    gathered: int
    """Of its whole weights."""
    cast: int
    """Of this device's share of those that are gathered in another type than kept in, or from the host."""
    reduced: int
    """Of its whole gradients in the type that they are summed in."""
    named: int = 0
    """Of the last gradient, which a loop of torch's names until the sum is done."""


class Sharded(NoSharding):
    """FSDP 2 over so many devices, on a tape."""

    def __init__(self, tape: Tape, root: Unit, layer: Unit, shards: int, *, keeps: bool) -> None:
        """`keeps`: the summed gradients stay, and are not just added to earlier ones."""
        self.tape, self.root, self.layer, self.shards = tape, root, layer, shards
        self.keeps = keeps
        self.own = 0
        """Of the tape's communication, what is not whole gradients."""
        self.fetched = 0
        """What the latest gather of the forward pass was received in, kept until the next has been copied out."""
        self.sent = 0
        """What the latest reduction was sent from, kept until the next unit's."""
        self.ends = 0
        """Whole gradients of the root's, until the end."""
        tape.whole = "communication"

    def _shift(self, size: int) -> None:
        self.own += size
        self.tape.adjust("communication", size)

    def _receive(self, unit: Unit) -> None:
        self._shift(unit.cast)
        self._shift(unit.gathered)
        self._shift(-unit.cast)

    def _forward(self, unit: Unit) -> None:
        self._receive(unit)
        self._shift(unit.gathered)  # copied out, weight by weight
        self._shift(-self.fetched)
        self.fetched = unit.gathered

    def gather_root(self) -> None:
        self._forward(self.root)

    def gather(self) -> None:
        self._forward(self.layer)

    def let_go(self) -> None:
        self._shift(-self.layer.gathered)

    def leave_root(self) -> None:
        self._shift(-self.fetched)

    def turn(self) -> None:
        self._receive(self.layer)

    def gather_back(self, *, ahead: bool) -> None:
        self.ends += self._whole()
        self._shift(self.layer.gathered)  # copied out of what was fetched, which goes
        self._shift(-self.layer.gathered)
        if ahead:
            self._receive(self.layer)

    def reduce(self) -> None:
        self._reduce(self.layer, self._whole())

    def reduce_root(self) -> None:
        whole, self.ends = self.ends + self._whole(), 0
        self._reduce(self.root, whole)
        self._shift(-self.sent)

    def _whole(self) -> int:
        """Gradients that were made since the latest unit's."""
        return self.tape.live["communication"] - self.own - self.ends

    def _reduce(self, unit: Unit, whole: int) -> None:
        self._shift(-unit.gathered - self.sent)
        self.sent = unit.reduced
        if not unit.reduced:
            return
        self._shift(unit.reduced)
        self.tape.adjust("communication", unit.named - whole)
        kept = unit.reduced // self.shards
        self.tape.adjust("gradients", kept)
        if not self.keeps:
            self.tape.adjust("gradients", -kept)
        self.tape.adjust("communication", -unit.named)


def world_of(shape: ModelShape, step: Step, trained: int, tape: Tape) -> NoSharding:
    """What is exchanged while the step is played on the tape. `trained`: weights of all devices."""
    if not step.divided:
        return NoSharding()
    n = step.numerics
    # hybrid: a unit names what its machines have summed to the end of the pass
    keeps = step.replicas > 1 or not (step.accumulated or step.offload)
    root, layer = units(shape, n, trained, step.shards, offload=step.offload)
    return Sharded(tape, root, layer, step.shards, keeps=keeps)


def units(shape: ModelShape, n: Numerics, trained: int, shards: int, *, offload: bool) -> tuple[Unit, Unit]:
    """(the root, a layer) where so many weights are trained. `offload`: shares are in the host's memory."""
    ends = root_parameters(shape)
    layer = (shape.parameters - ends) // shape.layers
    beside = trained_parameters(shape, n) - adapter_parameters(shape, n.rank, n.adapted)
    kept = layer_bytes(shape, n) + (layer - layer_matrices(shape)) * n.weight

    def unit(held: int, learnt: int, named: int = 0) -> Unit:
        width = n.weight if n.full else n.adapters
        gathered = held + (0 if n.full else learnt * width)
        cast = gathered if offload else learnt * width if n.trained != width else 0
        return Unit(gathered=gathered, cast=cast // shards, reduced=learnt * n.trained, named=named)

    head = 0 if shape.tied_embeddings or not n.full else shape.vocabulary * shape.hidden * n.weight
    inner = layer if n.full else max(0, trained - beside) // shape.layers
    return unit(ends * n.weight, ends if n.full else beside, head), unit(kept, inner)


def root_parameters(shape: ModelShape) -> int:
    """Of what is in no layer: embeddings, the last norm, the head."""
    h, build = shape.hidden, family_spec(shape)
    rows = shape.vocabulary * (1 if shape.tied_embeddings else 2) + sum(shape.looked_up) + shape.labels
    if not build.rotary and not shape.looked_up:  # positions are learned
        rows += shape.max_positions or 0
    dense = h * h if shape.head == "text" and build.encoder else 0
    return rows * h + dense + h * (2 if build.norm == "layer" else 1)

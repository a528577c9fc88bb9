"""FSDP 2 during a simulated step: the buffers that torch's `_fsdp_param_group.py` gathers, sends and frees, and when.

A buffer counts until Python releases it, as in the caching allocator. Each layer is a unit; the root holds all other
weights and stays unsharded from before the embeddings to the end of the backward pass.
"""

from dataclasses import dataclass

from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import Numerics, family_spec, layer_matrices
from broker.estimator.architecture.model_states import adapter_parameters, layer_bytes, trained_parameters
from broker.estimator.memory.simulator.tape import Tape
from broker.estimator.memory.simulator.types import Step


class NoSharding:
    """Gathers nothing: one device, or devices whose exchange is added after the simulation."""

    def gather_root(self) -> None:
        """Gather the root, before the embeddings."""

    def gather(self) -> None:
        """Gather a layer, before its forward pass."""

    def free_layer(self) -> None:
        """Free a layer, after its forward pass."""

    def free_root(self) -> None:
        """Free the root's gather buffer, when the model returns its logits."""

    def gather_last_layer(self) -> None:
        """Gather the last layer, when the gradient of the logits exists."""

    def gather_back(self, *, ahead: bool) -> None:
        """Unpack a layer before its backward pass. `ahead`: another layer follows and is gathered too."""

    def reduce(self) -> None:
        """Reduce a layer's gradients, after its backward pass.

        If nothing before the first layer requires a gradient, torch reduces that layer after the root, which needs no
        more memory.
        """

    def reduce_root(self) -> None:
        """Reduce the root's gradients, at the end of the backward pass."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Weights that are gathered and reduced together; all sizes are in bytes."""

    gathered: int
    """Bytes of the unsharded weights."""
    cast: int
    """Bytes of this device's shards that are gathered in another type than they are kept in, or from the host."""
    reduced: int
    """Bytes of the unsharded gradients in the type of the reduction."""
    named: int = 0
    """Bytes of the last gradient, which a loop variable of torch holds until the reduction is done."""


class Sharded(NoSharding):
    """FSDP 2 over `shards` devices, on a tape."""

    def __init__(self, tape: Tape, root: Unit, layer: Unit, shards: int, *, keeps: bool) -> None:
        """Prepare the tape. `keeps`: reduced gradients stay allocated, instead of being added to earlier ones."""
        self.tape, self.root, self.layer, self.shards = tape, root, layer, shards
        self.keeps = keeps
        self.own = 0
        """Communication bytes on the tape, unsharded gradients excluded."""
        self.fetched = 0
        """Bytes of the latest forward gather's buffer, which lives until the next one has been copied out."""
        self.sent = 0
        """Bytes of the latest reduction's buffer, which lives until the next unit's reduction."""
        self.ends = 0
        """Bytes of the root's unsharded gradients, until the end."""
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

    def free_layer(self) -> None:
        self._shift(-self.layer.gathered)

    def free_root(self) -> None:
        self._shift(-self.fetched)

    def gather_last_layer(self) -> None:
        self._receive(self.layer)

    def gather_back(self, *, ahead: bool) -> None:
        self.ends += self._unsharded_gradient_bytes()
        self._shift(self.layer.gathered)  # copied out of the gather buffer, which is freed
        self._shift(-self.layer.gathered)
        if ahead:
            self._receive(self.layer)

    def reduce(self) -> None:
        self._reduce(self.layer, self._unsharded_gradient_bytes())

    def reduce_root(self) -> None:
        unsharded_bytes, self.ends = self.ends + self._unsharded_gradient_bytes(), 0
        self._reduce(self.root, unsharded_bytes)
        self._shift(-self.sent)

    def _unsharded_gradient_bytes(self) -> int:
        """Return the bytes of all gradients that were made after those of the latest unit."""
        return self.tape.live["communication"] - self.own - self.ends

    def _reduce(self, unit: Unit, unsharded_bytes: int) -> None:
        self._shift(-unit.gathered - self.sent)
        self.sent = unit.reduced
        if not unit.reduced:
            return
        self._shift(unit.reduced)
        self.tape.adjust("communication", unit.named - unsharded_bytes)
        shard = unit.reduced // self.shards
        self.tape.adjust("gradients", shard)
        if not self.keeps:
            self.tape.adjust("gradients", -shard)
        self.tape.adjust("communication", -unit.named)


def sharding_of(shape: ModelShape, step: Step, trained: int, tape: Tape) -> NoSharding:
    """Return the model of gathers and reductions in the simulated step. `trained`: trained weights of all devices."""
    if not step.divided:
        return NoSharding()
    n = step.numerics
    # Hybrid: a variable of each unit holds the gradients that its machines have summed until the pass ends.
    keeps = step.replicas > 1 or not (step.accumulated or step.offload)
    root, layer = units(shape, n, trained, step.shards, offload=step.offload)
    return Sharded(tape, root, layer, step.shards, keeps=keeps)


def units(shape: ModelShape, n: Numerics, trained: int, shards: int, *, offload: bool) -> tuple[Unit, Unit]:
    """Return (the root, a layer) for `trained` trained weights. `offload`: the shards are in host memory."""
    ends = root_parameters(shape)
    tower = shape.tower.parameters if shape.tower else 0
    layer = (shape.parameters - tower - ends) // shape.layers
    extra = trained_parameters(shape, n) - adapter_parameters(shape, n.rank, n.adapted)
    layer_base = layer_bytes(shape, n) + (layer - layer_matrices(shape)) * n.weight

    def unit(held: int, trained_here: int, named: int = 0) -> Unit:
        width = n.weight if n.full else n.adapters
        gathered = held + (0 if n.full else trained_here * width)
        cast = gathered if offload else trained_here * width if n.trained != width else 0
        return Unit(gathered=gathered, cast=cast // shards, reduced=trained_here * n.trained, named=named)

    head = 0 if shape.tied_embeddings or not n.full else shape.vocabulary * shape.hidden * n.weight
    inner = layer if n.full else max(0, trained - extra) // shape.layers
    return unit((ends + tower) * n.weight, ends if n.full else extra, head), unit(layer_base, inner)


def root_parameters(shape: ModelShape) -> int:
    """Return the parameters outside the layers: embeddings, the last norm, the head."""
    h, build = shape.hidden, family_spec(shape)
    rows = shape.vocabulary * (1 if shape.tied_embeddings else 2) + sum(shape.looked_up) + shape.labels
    if not build.rotary and not shape.looked_up:  # learned positions
        rows += shape.max_positions or 0
    dense = h * h if shape.head == "text" and build.encoder else 0
    return rows * h + dense + h * (2 if build.norm == "layer" else 1)

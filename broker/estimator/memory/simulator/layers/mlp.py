"""Simulation of an MLP, and of a mixture of experts: each token passes through some experts, which are summed.

All experts are assumed to get equally many tokens.
"""

from broker.estimator.memory.simulator.layers.activations import activate
from broker.estimator.memory.simulator.layers.layer_ops import LayerOps
from broker.estimator.memory.simulator.tensors import Tensor

MAX_TURNS = 8
"""Largest number of simulated turns. With more experts, one turn represents several."""


class Mlp:
    """MLP of a layer, or its mixture of experts."""

    def __init__(self, ops: LayerOps) -> None:
        self.ops, self.tape, self.shape, self.numerics = ops, ops.tape, ops.shape, ops.numerics

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output of the MLP or of the mixture; the caller still holds `x`."""
        return self._mixture(x) if self.shape.experts else self.mlp(x)

    def activate(self, x: Tensor) -> Tensor:
        """Apply the MLP's activation; the caller still holds `x`."""
        return activate(self.tape, x, self.shape.activation, autocast=self.numerics.autocast)

    def mlp(self, x: Tensor) -> Tensor:
        """Apply the gated or plain MLP; the caller still holds its input."""
        names = self.ops.build.names
        if "fc" in names:
            return self._plain(x)
        return self._gated_by_half(x) if "gate_up" in names else self._gated(x)

    def _plain(self, x: Tensor) -> Tensor:
        """Multiply by a matrix, apply the activation, and multiply by another matrix."""
        wide = self.ops.linear(x, "fc")
        activated = self.tape.after(wide, self.activate(wide))
        return self.tape.after(activated, self.ops.linear(activated, "proj"))

    def _gated(self, x: Tensor) -> Tensor:
        """Multiply the activated gate by a projection of its own. The gate is freed before the projection."""
        tape = self.tape
        gate = self.ops.linear(x, "gate")
        activated = tape.after(gate, self.activate(gate))
        up = self.ops.linear(x, "up")
        product = tape.product(activated, up)
        tape.drop(activated, up)
        return tape.after(product, self.ops.linear(product, "down"))

    def _gated_by_half(self, x: Tensor) -> Tensor:
        """Multiply the activated half of a fused projection by its other half. Both are views until the product."""
        tape = self.tape
        fused = self.ops.linear(x, "gate_up")
        gate, up = tape.split(fused, (fused.count // 2, fused.count // 2))
        tape.drop(fused)
        activated = self.activate(gate)
        product = tape.product(activated, up)
        tape.drop(activated, up, gate)
        return tape.after(product, self.ops.linear(product, "down"))

    def _mixture(self, x: Tensor) -> Tensor:
        """Return the mixture's output, in place of an MLP; the caller still holds `x`."""
        s, tape, ops, tokens = self.shape, self.tape, self.ops, self.ops.tokens
        scores = tape.route(x, tokens * s.experts, trained=self.numerics.full)
        total = (self._in_turn if self.numerics.experts_in_turn else self._at_once)(x, scores)
        ops.tokens = tokens
        tape.drop(scores)
        return total

    def _at_once(self, x: Tensor, scores: Tensor) -> Tensor:
        """Run all experts in one matrix product, as transformers 5 does."""
        s, tape, ops, tokens = self.shape, self.tape, self.ops, self.ops.tokens
        ops.tokens = tokens * s.active_experts
        total = tape.new(x.count, x.width)
        sent = tape.resize(x, ops.tokens * (x.count // tokens))
        outputs = self.mlp(sent)
        weighted = tape.elementwise(outputs, scores)
        tape.drop(sent, outputs)
        total = tape.after(total, tape.add(total, weighted, width=x.width))
        tape.drop(weighted)
        return total

    def _in_turn(self, x: Tensor, scores: Tensor) -> Tensor:
        """Run one expert after another, as transformers 4 does (MixtralSparseMoeBlock).

        Tensors in the variables of a turn live until the next turn replaces them.
        """
        s, tape, ops, tokens = self.shape, self.tape, self.ops, self.ops.tokens
        turns = min(s.experts, MAX_TURNS)
        total = tape.new(x.count, x.width)
        one_hot = tape.new(tokens * s.active_experts * s.experts, 8)  # one_hot's integers
        ops.tokens = -(-tokens * s.active_experts // turns)
        named: list[Tensor] = []
        for _ in range(turns):
            sent = tape.resize(x, ops.tokens * (x.count // tokens))
            tape.drop(*named[:1])
            outputs = self.mlp(sent)
            weighted = tape.elementwise(outputs, scores, back=outputs.size)
            tape.drop(outputs, *named[1:])
            total = tape.add_in_place(total, weighted)
            named = [sent, weighted]
        tape.drop(one_hot, *named)
        return total

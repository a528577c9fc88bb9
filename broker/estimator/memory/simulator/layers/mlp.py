"""Simulation of an MLP, and of a mixture of experts: each token passes through some experts, which are summed.

All experts are assumed to get equally many tokens.
"""

from broker.estimator.memory.simulator.layers.activations import activate
from broker.estimator.memory.simulator.layers.layer_ops import LayerOps
from broker.estimator.memory.simulator.tensors import Tensor

MOST_TURNS = 8
"""Largest number of simulated turns. With more experts, one turn represents several."""


class Mlp(LayerOps):
    """MLP of a layer, or its mixture of experts."""

    def activate(self, x: Tensor) -> Tensor:
        """Apply the MLP's activation; the caller still holds `x`."""
        return activate(self.tape, x, self.shape.activation, autocast=self.numerics.autocast)

    def feed(self, x: Tensor) -> Tensor:
        """Apply the MLP or the mixture of experts."""
        return _mixture(self, x) if self.shape.experts else self.mlp(x)

    def mlp(self, x: Tensor) -> Tensor:
        """Apply the gated or plain MLP; the caller still holds its input."""
        tape, names = self.tape, self.build.names
        if "fc" in names:
            wide = self.linear(x, "fc")
            bent = self.activate(wide)
            tape.drop(wide)
            out = self.linear(bent, "proj")
            tape.drop(bent)
            return out
        if "gate_up" in names:
            fused = self.linear(x, "gate_up")
            gate, up = tape.split(fused, (fused.count // 2, fused.count // 2))
            tape.drop(fused)
        else:
            gate = self.linear(x, "gate")
        bent = self.activate(gate)
        if "gate_up" not in names:
            tape.drop(gate)
            up = self.linear(x, "up")
        product = tape.product(bent, up)
        tape.drop(bent, up, *([gate] if "gate_up" in names else []))
        out = self.linear(product, "down")
        tape.drop(product)
        return out


def _mixture(layer: Mlp, x: Tensor) -> Tensor:
    """Return the mixture's output, in place of an MLP; the caller still holds `x`."""
    s, tape, tokens = layer.shape, layer.tape, layer.tokens
    scores = tape.route(x, tokens * s.experts, trained=layer.numerics.full)
    total = (_in_turn if layer.numerics.experts_in_turn else _at_once)(layer, x, scores)
    layer.tokens = tokens
    tape.drop(scores)
    return total


def _at_once(layer: Mlp, x: Tensor, scores: Tensor) -> Tensor:
    """Run all experts in one matrix product, as transformers 5 does."""
    s, tape, tokens = layer.shape, layer.tape, layer.tokens
    layer.tokens = tokens * s.active_experts
    total = tape.new(x.count, x.width)
    sent = tape.resize(x, layer.tokens * (x.count // tokens))
    outputs = layer.mlp(sent)
    weighted = tape.elementwise(outputs, scores)
    tape.drop(sent, outputs)
    total = tape.after(total, tape.add(total, weighted, width=x.width))
    tape.drop(weighted)
    return total


def _in_turn(layer: Mlp, x: Tensor, scores: Tensor) -> Tensor:
    """Run one expert after another, as transformers 4 does (MixtralSparseMoeBlock).

    Tensors in the variables of a turn live until the next turn replaces them.
    """
    s, tape, tokens = layer.shape, layer.tape, layer.tokens
    turns = min(s.experts, MOST_TURNS)
    total = tape.new(x.count, x.width)
    chosen = tape.new(tokens * s.active_experts * s.experts, 8)  # one_hot's integers
    layer.tokens = -(-tokens * s.active_experts // turns)
    named: list[Tensor] = []
    for _ in range(turns):
        sent = tape.resize(x, layer.tokens * (x.count // tokens))
        tape.drop(*named[:1])
        outputs = layer.mlp(sent)
        weighted = tape.elementwise(outputs, scores, back=outputs.size)
        tape.drop(outputs, *named[1:])
        total = tape.add_in_place(total, weighted)
        named = [sent, weighted]
    tape.drop(chosen, *named)
    return total

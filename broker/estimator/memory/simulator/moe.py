"""Tensors of a mixture of experts: every token passes through some experts, whose outputs are weighted and summed.

All experts are assumed to get equally many tokens.
"""

from typing import Protocol

from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import Numerics
from broker.estimator.memory.simulator.tape import Tape, Tensor

MOST_TURNS = 8
"""Largest number of simulated turns. With more experts, one turn represents several."""


class Experts(Protocol):
    """The layer that contains the mixture."""

    tape: Tape
    shape: ModelShape
    numerics: Numerics
    tokens: int

    def mlp(self, x: Tensor) -> Tensor: ...


def mixture(layer: Experts, x: Tensor) -> Tensor:
    """Return the mixture's output, in place of an MLP; the caller still holds `x`."""
    s, tape, tokens = layer.shape, layer.tape, layer.tokens
    scores = tape.op([x], tokens * s.experts, 4, saves=[x] if layer.numerics.full else [], saves_out=True)
    total = (_in_turn if layer.numerics.experts_in_turn else _at_once)(layer, x, scores)
    layer.tokens = tokens
    tape.drop(scores)
    return total


def _at_once(layer: Experts, x: Tensor, scores: Tensor) -> Tensor:
    """Run all experts in one matrix product, as transformers 5 does."""
    s, tape, tokens = layer.shape, layer.tape, layer.tokens
    layer.tokens = tokens * s.active_experts
    total = tape.new(x.count, x.width)
    sent = tape.op([x], layer.tokens * (x.count // tokens), x.width)
    outputs = layer.mlp(sent)
    weighted = tape.op([outputs, scores], outputs.count, outputs.width, saves=[outputs])
    tape.drop(sent, outputs)
    total = tape.after(total, tape.op([total, weighted], x.count, x.width, passthrough_grad=True))
    tape.drop(weighted)
    return total


def _in_turn(layer: Experts, x: Tensor, scores: Tensor) -> Tensor:
    """Run one expert after another, as transformers 4 does (MixtralSparseMoeBlock).

    Tensors that a turn names live until the next turn replaces them.
    """
    s, tape, tokens = layer.shape, layer.tape, layer.tokens
    turns = min(s.experts, MOST_TURNS)
    total = tape.new(x.count, x.width)
    chosen = tape.new(tokens * s.active_experts * s.experts, 8)  # one_hot's integers
    layer.tokens = -(-tokens * s.active_experts // turns)
    named: list[Tensor] = []
    for _ in range(turns):
        sent = tape.op([x], layer.tokens * (x.count // tokens), x.width)
        tape.drop(*named[:1])
        outputs = layer.mlp(sent)
        weighted = tape.op([outputs, scores], outputs.count, outputs.width, saves=[outputs], back=outputs.size)
        tape.drop(outputs, *named[1:])
        total = tape.added(total, weighted)
        named = [sent, weighted]
    tape.drop(chosen, *named)
    return total

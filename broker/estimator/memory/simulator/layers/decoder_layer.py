"""Simulation of one decoder layer: the operations of transformers' own modules, in order."""

from collections.abc import Sequence

from broker.estimator.memory.simulator.layers.attention import Attention
from broker.estimator.memory.simulator.layers.layer_ops import LayerOps
from broker.estimator.memory.simulator.layers.mlp import Mlp
from broker.estimator.memory.simulator.tensors import Tensor


class Layer:
    """One layer: attention and MLP with their norms and residual connections."""

    def __init__(self, ops: LayerOps) -> None:
        self.ops, self.tape, self.shape, self.build = ops, ops.tape, ops.shape, ops.build
        self.attention, self.mlp = Attention(ops), Mlp(ops)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output; the caller still holds `x`."""
        tape = self.tape
        if self.build.norm_after:
            return self._norms_behind(x)
        normed = self._normed(x)
        ahead = [self.ops.norm(x)] if self.build.normed_first and self.shape.parallel_norms == 2 else []
        attended = self.attention.weigh(*(heads := self.attention.heads(normed)))
        out = self.ops.linear(attended, "o")
        tape.drop(attended, *heads)
        if self.shape.parallel:
            return self._parallel(x, normed, ahead, out)
        tape.drop(normed)
        if self.build.names_attended:
            out.retain()
        between = self.add(x, out)
        normed = self._normed(between)
        more = self.mlp(normed)
        tape.drop(normed)
        result = self.add(between, more)
        tape.drop(between, *([out] if self.build.names_attended else ()))
        return result

    def _normed(self, x: Tensor) -> Tensor:
        """Return the input of attention or MLP."""
        return self.tape.hold(x) if self.build.output_norms else self.ops.norm(x)

    def add(self, x: Tensor, more: Tensor) -> Tensor:
        """Add a residual connection and consume `more`. Some families scale it or apply dropout first."""
        tape = self.tape
        if self.build.norms == 4 or self.build.output_norms:
            more = tape.after(more, self.ops.norm(more))
        if self.build.scaled:
            more = tape.after(more, tape.scale(more))
        if self.shape.dropout:
            more = tape.after(more, self.ops.dropout(more))
        out = tape.add(x, more)
        tape.drop(more)
        return out

    def _norms_behind(self, x: Tensor) -> Tensor:
        """Run the layer as in BERT, with a norm after each residual connection."""
        attended = self.attention.weigh(*(heads := self.attention.heads(x)))
        is_module = self.build.named  # attention is a module of its own
        self.tape.drop(*heads if is_module else ())
        between = self._normed_sum(x, attended, "o", *() if is_module else heads)
        wide = self.ops.linear(between, "fc")
        bent = self.tape.after(wide, self.mlp.activate(wide))
        result = self._normed_sum(between, bent, "proj")
        self.tape.drop(between)
        return result

    def _normed_sum(self, x: Tensor, inner: Tensor, role: str, *named: Tensor) -> Tensor:
        """Return the norm of `x` plus the matrix times `inner`, which it consumes; `named` is freed after that."""
        tape, more = self.tape, self.ops.linear(inner, role)
        tape.drop(*named)
        if not self.build.named:
            tape.drop(inner)
        if self.shape.dropout and (role != "o" or self.build.drops):
            more = tape.after(more, self.ops.dropout(more))
        added = tape.add(x, more)
        out = self.ops.norm(added)
        tape.drop(added, more, *([inner] if self.build.named else []))
        return out

    def _parallel(self, x: Tensor, normed: Tensor, ahead: Sequence[Tensor], attended: Tensor) -> Tensor:
        """Run attention and MLP in parallel, after one norm or one norm each.

        `ahead`: the input of the MLP, if its norm was computed before.
        """
        tape, named = self.tape, self.build.normed_first
        if self.shape.parallel_norms == 2 and not named:
            normed = tape.after(normed, self.ops.norm(x))
        more = self.mlp.mlp(*(ahead or [normed]))
        tape.drop(*[] if named or self.build.added_in_turn else [normed])
        if self.build.added_in_turn:
            first = tape.add(x, attended)
            output = tape.after(first, tape.add(first, more))
            tape.drop(normed, more, attended)
            return output
        summed = tape.add(more, attended)
        tape.drop(more, attended)
        output = self.add(x, summed)
        tape.drop(*[normed, *ahead] if named else [])
        return output

"""Simulation of one layer of an encoder-decoder, by the T5 and BART modules of transformers 5.17.

A decoder layer has self attention over the target, and cross attention over the encoder's output.
"""

from dataclasses import dataclass

from broker.estimator.architecture.families import CROSS
from broker.estimator.memory.simulator.layers.decoder_layer import Layer
from broker.estimator.memory.simulator.layers.layer_ops import LayerOps
from broker.estimator.memory.simulator.layers.norms import t5_norm
from broker.estimator.memory.simulator.tensors import Tensor, Weight

ALIGNED = 8
"""Alignment of masks. torch's memory-efficient attention copies a mask whose rows are not contiguous, or whose length
is no multiple of this many elements (its `preprocess_mask`).
"""


@dataclass(kw_only=True)
class Shared:
    """Tensors that all layers of one stack share."""

    source: Tensor | None = None
    """Output of the encoder; None: this stack is the encoder."""
    biases: dict[str, Tensor]
    """T5's position biases by kind of attention; the first layer makes them."""

    @property
    def tensors(self) -> list[Tensor]:
        """All shared tensors."""
        return [*([self.source] if self.source else []), *self.biases.values()]


class Seq2SeqOps(LayerOps):
    """Operations of a layer of either stack; the number of tokens follows from each input."""

    def linear(self, x: Tensor, role: str) -> Tensor:
        """Return the output of one of the layer's linear modules with its adapter; some modules are not quantised."""
        inputs, outputs = self.sizes[role]
        self.tokens = x.count // inputs
        if role not in self.build.unquantised:
            return super().linear(x, role)
        output = self.matrix(x, self.weights[role], outputs)
        return self.adapt(x, output, role, outputs) if role in self.numerics.adapted else output

    def norm(self, x: Tensor, parts: int = 1) -> Tensor:
        """Normalise `x`, by T5's norm or as other layers do."""
        self.tokens = x.count // self.shape.hidden
        if self.build.norm == "layer":
            return super().norm(x, parts)
        return t5_norm(self.tape, x, self.norm_weight(self.shape.hidden), self.tokens)


class Seq2SeqLayer(Layer):
    """One layer of either stack. `first` makes the biases."""

    def __init__(self, ops: Seq2SeqOps, shared: Shared, *, first: bool, learnt: bool) -> None:
        super().__init__(ops)
        self.numerics, self.rows, self.length = ops.numerics, ops.rows, ops.length
        self.shared, self.first = shared, first
        self.named: list[Tensor] = []
        """Tensors that Python variables still hold."""
        self.learnt = learnt
        """T5 requires a gradient even of biases that are only zeros, as it does under checkpointing."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output; the caller still holds `x`."""
        own = dict(self.shared.biases)
        between = self._attended(x, "")
        if self.shared.source is not None:
            between = self.tape.after(between, self._attended(between, CROSS))
        result = self.tape.after(between, self._fed(between))
        self.tape.drop(*self.named)
        self.named.clear()
        if self.first and own:  # The layer was recomputed; the gradients of the other layers went to these biases.
            self.tape.drop(*self.shared.biases.values())
            self.shared.biases = own
        return result

    def _attended(self, x: Tensor, kind: str) -> Tensor:
        """Apply attention of that kind with its residual connection."""
        tape, norm_after = self.tape, self.build.norm_after
        if norm_after:
            x.retain()
        normed = x if norm_after else self.ops.norm(x)
        source = self.shared.source if kind else normed
        assert source is not None
        heads = [self.ops.linear(normed, f"{kind}q"), *(self.ops.linear(source, f"{kind}{role}") for role in "kv")]
        attended = self._attention(heads, kind)
        out = self.ops.linear(attended, f"{kind}o")
        tape.drop(attended, *heads)
        return self._joined(x, normed, out)

    def _joined(self, x: Tensor, normed: Tensor, out: Tensor) -> Tensor:
        """Add the residual connection; consumes the last two tensors."""
        tape = self.tape
        more = self.ops.dropout(out) if self.shape.dropout else tape.cast(out, out.width)
        if self.build.norm_after:
            tape.drop(out, normed)
        added = tape.add(x, more)
        tape.drop(more)
        if self.build.norm_after:
            return tape.after(added, self.ops.norm(added))
        tape.drop(out, normed)
        return added

    def _fed(self, x: Tensor) -> Tensor:
        """Apply the MLP with its residual connection."""
        tape, norm_after = self.tape, self.build.norm_after
        if norm_after:
            x.retain()
        normed = x if norm_after else self.ops.norm(x)
        named: list[Tensor] = []
        if "gate" in self.ops.sizes:
            gate = self.ops.linear(normed, "gate")
            bent = tape.after(gate, self.mlp.activate(gate))
            up = self.ops.linear(normed, "up")
            inner = tape.bilinear(bent, up, up.count)
            named = [bent, up]
        else:
            wide = self.ops.linear(normed, "fc")
            inner = tape.after(wide, self.mlp.activate(wide))
        if self.shape.inner_dropout:
            inner = tape.after(inner, self.ops.dropout(inner))
        if self.build.unquantised:  # T5 casts to the matrix's own type
            inner = tape.after(inner, tape.cast(inner, self.numerics.weight))
        out = tape.after(inner, self.ops.linear(inner, "down" if "gate" in self.ops.sizes else "proj"))
        tape.drop(*named)
        return self._joined(x, normed, out)

    def _bias(self, kind: str, q: Tensor, keys: int) -> Tensor | None:
        """Return T5's position bias of this kind of attention: a number for each head and pair of tokens.

        All rows and layers share it. Other families have none.
        """
        if not self.shape.buckets:
            return None
        if not self.first:
            return self.shared.biases[kind]
        tape, n, pairs = self.tape, self.numerics, self.length * keys
        trained = n.full and not kind
        if kind:
            bias = tape.new(self.shape.heads * pairs, q.width, grad=self.learnt)
        else:
            tape.adjust("temporary", 49 * pairs)  # distances, their logarithms and buckets, most of them 8 bytes each
            tape.adjust("temporary", -49 * pairs)
            buckets = tape.new(pairs, 8)
            table = Weight(self.shape.buckets * self.shape.heads, n.weight, trained=trained, grad_width=n.trained)
            bias = tape.lookup(table, self.shape.heads * pairs, n.trained, indices=[buckets])
            tape.drop(buckets)
        if kind and self.learnt and kind not in self.shared.biases:
            bias.retain()  # the bias requires a gradient, so the graph holds it to the end
        if kind in self.shared.biases:
            bias.gradient, self.shared.biases[kind].gradient = self.shared.biases[kind].gradient, None
        self.shared.biases[kind] = bias
        return bias

    def _attention(self, heads: list[Tensor], kind: str) -> Tensor:
        """Apply scaled dot-product attention. Variables of the calling module still hold the heads."""
        n, tape = self.numerics, self.tape
        keys = heads[1].count // self.rows // (self.shape.heads * self.shape.head_dim)
        bias = self._bias(kind, heads[0], keys)
        causal = self.shared.source is not None and not kind
        if n.attention == "eager":
            return self._explicit_attention(heads, keys, bias, causal=causal)
        q, k, v = (tape.cast(t, n.compute if n.autocast else t.width) for t in heads)
        masks = [] if bias is None else [self._mask(bias, keys, causal=causal, plain=bool(kind))]
        sums = self.rows * self.length * self.shape.heads
        out = tape.fused_attention([q, k, v], masks, sums, self._backward_bytes(q, keys, masks))
        tape.drop(q, k, v, *masks, *self.named)
        self.named.clear()
        return out

    def _backward_bytes(self, q: Tensor, keys: int, masks: list[Tensor]) -> int:
        """Return the additional bytes of the kernel's backward pass.

        The kernel sums the queries' gradients in float32, padded to its tiles. After these it makes the bias's gradient
        for every row.
        """
        s = self.shape
        padded = -(-self.length // 128) * 128, -(-s.head_dim // 32) * 32 + 1
        sums = self.rows * s.heads * padded[0] * padded[1] * 4
        if not any(m.grad for m in masks):
            return sums
        score_bytes = self.rows * s.heads * self.length * keys * q.width if self.rows > 1 else 0
        return max(score_bytes, sums - masks[0].size)

    def _mask(self, bias: Tensor, keys: int, *, causal: bool, plain: bool) -> Tensor:
        """Return the bias as the kernel takes it. In a learned bias, the heads are the last dimension in memory."""
        n, tape = self.numerics, self.tape
        mask = tape.cast(bias, bias.width)
        if causal:
            allowed = tape.new(self.length * keys, 1)
            mask = tape.after(mask, tape.where(allowed, mask))
            tape.drop(allowed)
            mask.retain()
            self.named.append(mask)
        if n.autocast:
            mask = tape.after(mask, tape.cast(mask, n.compute))
        if keys % ALIGNED or not plain:
            wide = keys + ALIGNED - keys % ALIGNED
            mask = tape.after(mask, tape.resize(mask, bias.count // keys * wide))
        return mask

    def _explicit_attention(self, heads: list[Tensor], keys: int, bias: Tensor | None, *, causal: bool) -> Tensor:
        """Apply transformers' own attention: product, scale, bias, mask, softmax."""
        n, tape = self.numerics, self.tape
        scores = self.rows * self.shape.heads * self.length * keys
        q, k, v = (tape.cast(t, n.compute if n.autocast else t.width) for t in heads)
        scores_tensor = tape.bilinear(q, k, scores)
        scores_tensor = tape.after(scores_tensor, tape.scale(scores_tensor))
        if bias is not None:
            scores_tensor = tape.after(scores_tensor, tape.add(scores_tensor, bias))
        if causal:
            mask = tape.new(self.rows * self.length * keys, scores_tensor.width)
            scores_tensor = tape.after(scores_tensor, tape.add(scores_tensor))
            tape.drop(mask)
        if n.autocast:
            scores_tensor = tape.after(scores_tensor, tape.cast(scores_tensor, 4))
        scores_tensor = tape.after(scores_tensor, tape.elementwise_by_result(scores_tensor))
        if self.shape.attention_dropout:
            scores_tensor = tape.after(scores_tensor, self.ops.dropout(scores_tensor))
        weights = tape.cast(scores_tensor, n.compute if n.autocast else scores_tensor.width)
        out = tape.bilinear(weights, v, q.count)
        tape.drop(weights, q, k, v, *self.named)
        self.named = [scores_tensor]  # until the next attention of the layer, or its end
        return tape.after(out, tape.scale(out))  # the heads are concatenated again

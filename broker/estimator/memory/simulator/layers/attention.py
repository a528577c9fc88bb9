"""Simulation of attention: rotary positions, heads, and the fused, eager and materialised kernels."""

from collections.abc import Sequence

from broker.estimator.memory.simulator.layers.layer_ops import LayerOps
from broker.estimator.memory.simulator.tensors import Tensor


class Attention:
    """Attention of a layer, from its normed input to the weighted values."""

    def __init__(self, ops: LayerOps) -> None:
        self.ops, self.tape, self.shape, self.numerics, self.build = ops, ops.tape, ops.shape, ops.numerics, ops.build
        self.rows, self.length = ops.rows, ops.length

    def rotate(self, x: Tensor) -> Tensor:
        """Apply rotary positions: products with cosines and sines, which need no gradient."""
        if not self.build.rotary:
            x.retain()
            return x
        extra = 0 if self.numerics.fused else x.count * x.width
        return self.tape.kernel(x, x.count, x.width, scratch=2 * extra, back=extra)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as the attention takes them."""
        q, k, v = self._turned_heads(x)
        # the copies of a single head are a view
        if self.numerics.repeated_keys and k.count != q.count and self.shape.kv_heads > 1:
            q, k, v = self._repeated([q, k, v])
        return q, k, v

    def _turned_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s, tape = self.shape, self.tape
        if "qkv" in self.build.names:
            return self._fused_heads(self.ops.linear(x, "qkv"))
        raw = [self.ops.linear(x, role) for role in ("q", "k", "v")]
        if self.build.head_norms or s.head_norms:
            for number, parts in enumerate((s.heads, s.kv_heads)):
                normed = self.ops.norm(raw[number], 1 if self.build.whole_norms else parts)
                tape.drop(raw[number])
                raw[number] = normed
        turned = self._rotated_wide(raw[:2]) if self.build.wide_rotary else [self.rotate(x) for x in raw[:2]]
        tape.drop(raw[0], raw[1])
        return turned[0], turned[1], raw[2]

    def _rotated_wide(self, heads: Sequence[Tensor]) -> list[Tensor]:
        """Apply rotary positions in float32. All casts live until the queries and the keys are cast back."""
        tape = self.tape
        wide = [tape.cast(x, 4) for x in heads]
        turned = [self.rotate(x) for x in wide]
        narrow = [tape.cast(x, heads[0].width) for x in turned]
        tape.drop(*turned, *wide)
        return narrow

    def _fused_heads(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the fused projection into views; it lives as long as any of them. Falcon copies its keys and values."""
        s, tape = self.shape, self.tape
        q, kv = self.ops.tokens * s.heads * s.head_dim, self.ops.tokens * s.kv_heads * s.head_dim
        views = tape.split(fused, (q, kv, kv))
        if self.numerics.presents:
            views[1].retain()
            self.ops.presents.append(views[1])
        tape.drop(fused)
        if self.build.broadcast:
            wide = self.ops.tokens * s.heads * s.head_dim if s.kv_heads > 1 else kv
            copies = [tape.resize(v, wide, back=fused.size) for v in views[1:]]
            tape.drop(*views[1:])
            views = [views[0], *copies]
        turned = self.rotate(views[0]), self.rotate(views[1])
        tape.drop(views[0], views[1])
        return *turned, views[2]

    def weigh(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Apply scaled dot-product attention, by a fused kernel if possible. The caller still holds the inputs."""
        n, s, tape = self.numerics, self.shape, self.tape
        halves = n.compute == 2 and (n.autocast or n.attention == "flash" or not n.rest_float32)
        grouped, width = k.count != q.count, 2 if halves else q.width
        shared = grouped and not n.repeated_keys  # a single head is repeated as a view, which every kernel accepts
        materialised = n.attention == "sdpa" and shared and (self.build.broadcast or width == 4)
        masked = self.ops.masked and n.attention != "eager" and not (materialised and self.build.broadcast)
        named: list[Tensor] = []
        if masked and grouped:  # no kernel shares keys under a mask
            q, (k, v, *named) = self.tape.cast(q, width), self._for_every_head(q.count, width, k, v)
        else:
            q, k, v = [self.tape.cast(t, 2 if halves else t.width) for t in (q, k, v)]
        if n.attention == "eager":
            return self._eager(q, k, v)
        bias = None
        if masked:  # in the type of the queries
            bias = tape.new(self.rows * self.length * self.length, q.width)
        elif materialised:
            return self._written_out(q, k, v)
        padded = -(-self.length // 128) * 128, -(-s.head_dim // 32) * 32 + 1
        back = self.rows * s.heads * padded[0] * padded[1] * 4 + (2 * q.size if grouped and not bias else 0)
        masks = [bias] if bias else []
        out = tape.fused_attention([q, k, v], masks, self.ops.tokens * s.heads, back)
        tape.drop(q, k, v, *masks, *named)
        return out

    def _for_every_head(self, count: int, width: int, *heads: Tensor) -> list[Tensor]:
        """Repeat keys and values for the queries' heads and then cast them; both versions live meanwhile.

        The repetition of a single head is a view, which a cast materialises (`repeat_kv` in transformers'
        sdpa_attention.py).
        """
        expanded, named, tape = [], [], self.tape
        for t in heads:
            if self.shape.kv_heads > 1:
                named.append(tape.resize(t, count))
                expanded.append(self.tape.cast(named[-1], width))
            elif t.width == width:
                expanded.append(self.tape.cast(t, width))
            else:
                expanded.append(tape.resize(t, count, width, back=count * t.width))
        return expanded + named

    def _written_out(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Apply torch's attention without a fused kernel: in float32, with all scores materialised."""
        tape, width = self.tape, q.width
        scores = self.rows * self.shape.heads * self.length * self.length
        wide = [self.tape.cast(t, 4) for t in (q, k, v)]
        tape.drop(q, k, v)
        if not self.build.broadcast:  # repeated for every head of a group
            wide = self._repeated(wide)
        scaled = [tape.scale(t) for t in wide[:2]]
        expanded = q.count * 4 if self.build.broadcast and self.rows == 1 else 0
        if self.build.broadcast and self.rows > 1:  # a view for one row, a copy for several rows
            scaled, wide = self._repeated(scaled), self._repeated(wide)
        product = tape.bilinear(scaled[0], scaled[1], scores, back=expanded)
        tape.drop(*scaled)
        masked = tape.add(product)
        tape.drop(product)
        soft = tape.elementwise_by_result(masked, 4)
        tape.drop(masked)
        narrow = tape.new(scores, width) if width != 4 else self.tape.cast(soft, 4)
        out = tape.bilinear(soft, wide[2], q.count, back=expanded)
        result = self.tape.cast(out, width)
        tape.drop(soft, narrow, out, *wide)
        return result

    def _repeated(self, heads: Sequence[Tensor]) -> list[Tensor]:
        """Expand keys and values to the size of the queries, which come first in `heads`."""
        more = [self.tape.resize(t, heads[0].count) for t in heads[1:]]
        self.tape.drop(*heads[1:])
        return [heads[0], *more]

    def _eager(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Apply transformers' own attention: product, scale, mask, softmax in float32; keys and values are repeated."""
        tape = self.tape
        scores = self.rows * self.shape.heads * self.length * self.length
        if k.count != q.count:
            q, k, v = self._repeated([q, k, v])
        product = tape.bilinear(q, k, scores)
        scaled = tape.scale(product)
        tape.drop(product)
        if self.build.capped_scores:
            scaled = self._capped(scaled)
        masked = tape.add(scaled)
        tape.drop(scaled)
        wide = tape.cast(masked, 4)
        soft = tape.elementwise_by_result(wide, 4)
        tape.drop(wide, masked)
        weights = self.tape.cast(soft, q.width)
        tape.drop(soft)
        out = tape.bilinear(weights, v, q.count)
        tape.drop(weights, q, k, v)
        return out

    def _capped(self, scores: Tensor) -> Tensor:
        """Divide the scores, pass them through tanh and multiply them again."""
        tape = self.tape
        divided = tape.scale(scores)
        tape.drop(scores)
        bounded = tape.elementwise_by_result(divided, divided.width)
        tape.drop(divided)
        capped = tape.scale(bounded)
        tape.drop(bounded)
        return capped

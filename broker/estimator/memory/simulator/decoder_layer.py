"""Simulation of one decoder layer: the operations of transformers' own modules, in order.

The saved tensors follow from torch's derivatives.yaml, the order of frees from the code of transformers 5.17 and peft
0.21. The reference for this module is trainer/memtrace/tracer.py, which runs that code itself.
"""

from collections.abc import Sequence

from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import Numerics, copies, family_spec, linears
from broker.estimator.memory.simulator.activations import activate
from broker.estimator.memory.simulator.moe import mixture
from broker.estimator.memory.simulator.tape import Tape, Tensor, Weight


class Layer:
    """One layer over `rows` rows of `length` tokens."""

    def __init__(
        self, tape: Tape, shape: ModelShape, numerics: Numerics, rows: int, length: int, *, masked: bool = False
    ) -> None:
        self.tape, self.shape, self.numerics, self.build = tape, shape, numerics, family_spec(shape)
        self.rows, self.length, self.tokens, self.masked = rows, length, rows * length, masked
        self.casts: list[Weight] = []
        """Weights whose half-precision copies autocast keeps until it ends."""
        self.presents: list[Tensor] = []
        """Keys and values that the layer returned, as views."""
        self.weights: dict[str, Weight] = {}
        n, self.sizes = numerics, linears(shape)
        for role, (inputs, outputs) in self.sizes.items():
            many = copies(shape, role)
            self.weights[role] = Weight(inputs * outputs * many, n.weight, trained=n.full, grad_width=n.trained)
            if role in n.adapted:
                for end, width in (("A", inputs), ("B", outputs)):
                    size = width * n.rank * many
                    self.weights[role + end] = Weight(size, n.adapters, trained=True, grad_width=n.adapters)

    def cast(self, x: Tensor, width: int) -> Tensor:
        """Return `x` cast to the width, or `x` itself with one more reference if it already has that width."""
        if x.width == width:
            x.retain()
            return x
        return self.tape.op([x], x.count, width)

    def forget(self) -> None:
        """Free the copies of weights that autocast kept, at its end."""
        for w in self.casts:
            assert w.cast is not None
            self.tape.drop(w.cast)
            w.cast = None
        self.casts.clear()

    def part(self) -> None:
        """Release the presents that the layer returned in addition to its output."""
        self.tape.drop(*self.presents)
        self.presents.clear()

    def matrix(self, x: Tensor, w: Weight, outputs: int) -> Tensor:
        """Return `x` times a matrix of this layer or of the head."""
        n, tape = self.numerics, self.tape
        into = self.cast(x, n.compute) if n.autocast else self.cast(x, max(x.width, w.width))
        saves, width, copy = [], into.width, None
        if n.autocast and w.width != n.compute:
            copy = w.cast or tape.new(w.count, n.compute)
            saves.append(copy)
        if w.trained:
            saves.append(into)
        trained = [(w, width)] if w.trained else []
        made = tape.op([into], self.tokens * outputs, width, saves=saves, weights=trained, saves_matrix=True)
        tape.drop(into)
        if copy is not None and w.cast is None:
            if self.build.cached_casts:
                w.cast = copy
                self.casts.append(w)
            else:
                tape.drop(copy)
        return made

    def quantised(self, x: Tensor, count: int, outputs: int) -> Tensor:
        """Return `x` times a quantised matrix.

        bitsandbytes unpacks the matrix for each use; the result has the type of the input. A matrix of 8 bits is always
        computed with in fp16.
        """
        width = 2 if self.numerics.bits == 8 else self.numerics.compute
        into = self.cast(x, width)
        beside = count // 64 * 4 if self.numerics.bits == 4 else self.tokens * (x.count // self.tokens)
        unpacked = count * width + beside
        out = self.tape.op([into], self.tokens * outputs, width, scratch=unpacked, back=unpacked)
        self.tape.drop(into)
        made = self.cast(out, x.width)
        self.tape.drop(out)
        return made

    def linear(self, x: Tensor, role: str) -> Tensor:
        """Return the output of one of the layer's linear modules, with its adapter."""
        inputs, outputs = self.sizes[role]
        w = self.weights[role]
        made = self.quantised(x, inputs * outputs, outputs) if self.numerics.bits else self.matrix(x, w, outputs)
        return self.adapt(x, made, role, outputs) if role in self.numerics.adapted else made

    def adapt(self, x: Tensor, base: Tensor, role: str, outputs: int) -> Tensor:
        """Add peft's LoRA, in the adapters' own type; under autocast in half precision."""
        n, tape = self.numerics, self.tape
        kept = n.bits and n.autocast  # peft's bitsandbytes layers do not cast then
        into = self.cast(x, x.width if kept else n.adapters)
        dropped = self.dropout(into) if n.dropout else self.cast(into, into.width)
        low = self.matrix(dropped, self.weights[role + "A"], n.rank)
        tape.drop(dropped)
        high = self.matrix(low, self.weights[role + "B"], outputs)
        tape.drop(low)
        scaled = tape.op([high], high.count, high.width)
        tape.drop(high)
        added = tape.op([base, scaled], base.count, max(base.width, scaled.width), passthrough_grad=True)
        tape.drop(base, scaled, into)
        result = self.cast(added, base.width)
        tape.drop(added)
        return result

    def dropout(self, x: Tensor) -> Tensor:
        """Apply dropout, which saves its mask."""
        mask = self.tape.new(x.count, self.numerics.mask or x.width)
        made = self.tape.op([x], x.count, x.width, saves=[mask], saves_own_output=True)
        self.tape.drop(mask)
        return made

    def norm(self, x: Tensor, parts: int = 1) -> Tensor:
        """Normalise `x`. `parts`: heads of a row that are normalised separately."""
        n, tape, kind = self.numerics, self.tape, self.build.norm
        weight = 4 if n.norms_float32 else n.weight
        w = Weight(x.count // self.tokens // parts, weight, trained=n.full, grad_width=n.trained)
        trained = [(w, n.trained)] if n.full else []
        wide = self.cast(x, 4) if kind != "layer" or n.autocast else self.cast(x, x.width)
        if kind == "layer":
            sums = tape.new(self.tokens * parts * 2, 4)
            out = tape.op([wide], x.count, wide.width, saves=[wide, sums], weights=trained, saves_own_output=True)
            tape.drop(wide, sums)
            return out
        squares = tape.op([wide], x.count, 4, saves=[wide], back=2 * x.count * 4)
        root = tape.op([squares], self.tokens * parts, 4)
        tape.drop(squares)
        normal = tape.op([wide, root], x.count, 4, saves=[wide, root], back=x.count * 4)
        tape.drop(wide, root)
        if kind == "gemma":
            scale = tape.new(w.count, 4)  # the weight plus one
            kept = [scale, normal] if n.full else [scale]
            scaled = tape.op([normal], x.count, 4, saves=kept, weights=trained)
            out = self.cast(scaled, x.width)
            tape.drop(scale, normal, scaled)
            return out
        narrow, width = tape.after(normal, self.cast(normal, x.width)), max(x.width, weight)
        # the weight's gradient before it is summed, or the input's before it is cast
        wide_gradient = n.full or narrow.width < width
        out = tape.op(
            [narrow], x.count, width, saves=[narrow] if n.full else [], weights=trained,
            back=x.count * width if wide_gradient else 0,
        )  # fmt: skip
        tape.drop(narrow)
        return out

    def rotate(self, x: Tensor) -> Tensor:
        """Apply rotary positions: products with cosines and sines, which need no gradient."""
        if not self.build.rotary:
            x.retain()
            return x
        extra = x.count * x.width
        return self.tape.op([x], x.count, x.width, scratch=2 * extra, back=extra)

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
            return self._fused_heads(self.linear(x, "qkv"))
        raw = [self.linear(x, role) for role in ("q", "k", "v")]
        if self.build.head_norms or s.head_norms:
            for number, parts in enumerate((s.heads, s.kv_heads)):
                normed = self.norm(raw[number], parts)
                tape.drop(raw[number])
                raw[number] = normed
        turned = self.rotate(raw[0]), self.rotate(raw[1])
        tape.drop(raw[0], raw[1])
        return *turned, raw[2]

    def _fused_heads(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the fused projection into views; it lives as long as any of them. Falcon copies its keys and values."""
        s, tape = self.shape, self.tape
        q, kv = self.tokens * s.heads * s.head_dim, self.tokens * s.kv_heads * s.head_dim
        views = tape.split(fused, (q, kv, kv))
        if self.numerics.presents:
            views[1].retain()
            self.presents.append(views[1])
        tape.drop(fused)
        if self.build.broadcast:
            wide = self.tokens * s.heads * s.head_dim if s.kv_heads > 1 else kv
            copies = [tape.op([v], wide, v.width, back=fused.size) for v in views[1:]]
            tape.drop(*views[1:])
            views = [views[0], *copies]
        turned = self.rotate(views[0]), self.rotate(views[1])
        tape.drop(views[0], views[1])
        return *turned, views[2]

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Apply scaled dot-product attention, by a fused kernel if possible. The caller still holds the inputs."""
        n, s, tape = self.numerics, self.shape, self.tape
        grouped, width = k.count != q.count, 2 if n.compute == 2 else q.width
        shared = grouped and not n.repeated_keys  # a single head is repeated as a view, which every kernel accepts
        written = n.attention == "sdpa" and shared and (self.build.broadcast or width == 4)
        masked = self.masked and n.attention != "eager" and not (written and self.build.broadcast)
        named: list[Tensor] = []
        if masked and grouped:  # no kernel shares keys under a mask
            q, (k, v, *named) = self.cast(q, width), self._for_every_head(q.count, width, k, v)
        else:
            q, k, v = [self.cast(t, 2 if n.compute == 2 else t.width) for t in (q, k, v)]
        if n.attention == "eager":
            return self._eager(q, k, v)
        bias = None
        if masked:  # in the type of the queries
            bias = tape.new(self.rows * self.length * self.length, q.width)
        elif written:
            return self._written_out(q, k, v)
        sums = tape.new(self.tokens * s.heads, 4)
        padded = -(-self.length // 128) * 128, -(-s.head_dim // 32) * 32 + 1
        back = self.rows * s.heads * padded[0] * padded[1] * 4 + (2 * q.size if grouped and not bias else 0)
        masks = [bias] if bias else []
        out = tape.op([q, k, v], q.count, q.width, saves=[q, k, v, sums, *masks], back=back, saves_out=True)
        tape.drop(q, k, v, sums, *masks, *named)
        return out

    def _for_every_head(self, count: int, width: int, *heads: Tensor) -> list[Tensor]:
        """Repeat keys and values for the queries' heads and then cast them; both versions live meanwhile.

        The repetition of a single head is a view, which a cast materialises (`repeat_kv` in transformers'
        sdpa_attention.py).
        """
        made, named, tape = [], [], self.tape
        for t in heads:
            if self.shape.kv_heads > 1:
                named.append(tape.op([t], count, t.width))
                made.append(self.cast(named[-1], width))
            elif t.width == width:
                made.append(self.cast(t, width))
            else:
                made.append(tape.op([t], count, width, back=count * t.width))
        return made + named

    def _written_out(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Apply torch's attention without a fused kernel: in float32, with all scores materialised."""
        tape, width = self.tape, q.width
        scores = self.rows * self.shape.heads * self.length * self.length
        wide = [self.cast(t, 4) for t in (q, k, v)]
        tape.drop(q, k, v)
        if not self.build.broadcast:  # repeated for every head of a group
            wide = self._repeated(wide)
        scaled = [tape.op([t], t.count, 4) for t in wide[:2]]
        expanded = q.count * 4 if self.build.broadcast and self.rows == 1 else 0
        if self.build.broadcast and self.rows > 1:  # a view for one row, a copy for several rows
            scaled, wide = self._repeated(scaled), self._repeated(wide)
        product = tape.op(scaled, scores, 4, saves=scaled, back=expanded)
        tape.drop(*scaled)
        masked = tape.op([product], scores, 4, passthrough_grad=True)
        tape.drop(product)
        soft = tape.op([masked], scores, 4, saves_out=True)
        tape.drop(masked)
        narrow = tape.new(scores, width) if width != 4 else self.cast(soft, 4)
        out = tape.op([soft, wide[2]], q.count, 4, saves=[soft, wide[2]], back=expanded)
        result = self.cast(out, width)
        tape.drop(soft, narrow, out, *wide)
        return result

    def _repeated(self, heads: Sequence[Tensor]) -> list[Tensor]:
        """Expand keys and values to the size of the queries, which come first in `heads`."""
        more = [self.tape.op([t], heads[0].count, t.width) for t in heads[1:]]
        self.tape.drop(*heads[1:])
        return [heads[0], *more]

    def _eager(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Apply transformers' own attention: product, scale, mask, softmax in float32; keys and values are repeated."""
        tape = self.tape
        scores = self.rows * self.shape.heads * self.length * self.length
        if k.count != q.count:
            q, k, v = self._repeated([q, k, v])
        product = tape.op([q, k], scores, q.width, saves=[q, k])
        scaled = tape.op([product], scores, q.width)
        tape.drop(product)
        masked = tape.op([scaled], scores, q.width, passthrough_grad=True)
        tape.drop(scaled)
        soft = tape.op([masked], scores, 4, saves_out=True)
        tape.drop(masked)
        weights = self.cast(soft, q.width)
        tape.drop(soft)
        out = tape.op([weights, v], q.count, q.width, saves=[weights, v])
        tape.drop(weights, q, k, v)
        return out

    def activate(self, x: Tensor) -> Tensor:
        """Apply the MLP's activation; the caller still holds `x`."""
        return activate(self.tape, x, self.shape.activation, autocast=self.numerics.autocast)

    def feed(self, x: Tensor) -> Tensor:
        """Apply the MLP or the mixture of experts."""
        return mixture(self, x) if self.shape.experts else self.mlp(x)

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

    def add(self, x: Tensor, more: Tensor) -> Tensor:
        """Add a residual connection and consume `more`. Some families scale it or apply dropout first."""
        tape = self.tape
        if self.build.norms == 4:
            more = self.tape.after(more, self.norm(more))
        if self.build.scaled:
            more = self.tape.after(more, tape.op([more], more.count, more.width))
        if self.shape.dropout:
            more = self.tape.after(more, self.dropout(more))
        out = tape.op([x, more], x.count, max(x.width, more.width), passthrough_grad=True)
        tape.drop(more)
        return out

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output; the caller still holds `x`."""
        tape = self.tape
        if self.build.behind:
            return self._norms_behind(x)
        normed = self.norm(x)
        ahead = [self.norm(x)] if self.build.normed_first and self.shape.parallel_norms == 2 else []
        attended = self.attention(*(heads := self.heads(normed)))
        out = self.linear(attended, "o")
        tape.drop(attended, *heads)
        if self.shape.parallel:
            return self._parallel(x, normed, ahead, out)
        tape.drop(normed)
        if self.build.names_attended:
            out.retain()
        between = self.add(x, out)
        normed = self.norm(between)
        more = self.feed(normed)
        tape.drop(normed)
        result = self.add(between, more)
        tape.drop(between, *([out] if self.build.names_attended else ()))
        return result

    def _norms_behind(self, x: Tensor) -> Tensor:
        """Run the layer as BERT does, with a norm after each residual connection."""
        attended = self.attention(*(heads := self.heads(x)))
        apart = self.build.named  # attention is a module of its own
        self.tape.drop(*heads if apart else ())
        between = self._normed_sum(x, attended, "o", *() if apart else heads)
        wide = self.linear(between, "fc")
        bent = self.tape.after(wide, self.activate(wide))
        result = self._normed_sum(between, bent, "proj")
        self.tape.drop(between)
        return result

    def _normed_sum(self, x: Tensor, inner: Tensor, role: str, *named: Tensor) -> Tensor:
        """Return the norm of `x` plus the matrix times `inner`, which it consumes; `named` is freed after that."""
        tape, more = self.tape, self.linear(inner, role)
        tape.drop(*named)
        if not self.build.named:
            tape.drop(inner)
        if self.shape.dropout and (role != "o" or self.build.drops):
            more = self.tape.after(more, self.dropout(more))
        added = tape.op([x, more], x.count, max(x.width, more.width), passthrough_grad=True)
        out = self.norm(added)
        tape.drop(added, more, *([inner] if self.build.named else []))
        return out

    def _parallel(self, x: Tensor, normed: Tensor, ahead: Sequence[Tensor], attended: Tensor) -> Tensor:
        """Run attention and MLP in parallel, after one norm or one norm each.

        `ahead`: the input of the MLP, if its norm was computed before.
        """
        tape, named = self.tape, self.build.normed_first
        if self.shape.parallel_norms == 2 and not named:
            normed = tape.after(normed, self.norm(x))
        more = self.mlp(*(ahead or [normed]))
        tape.drop(*[] if named else [normed])
        both = tape.op([more, attended], x.count, max(more.width, attended.width), passthrough_grad=True)
        tape.drop(more, attended)
        made = self.add(x, both)
        tape.drop(*[normed, *ahead] if named else [])
        return made

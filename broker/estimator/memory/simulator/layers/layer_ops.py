"""Operations that all layers are made of: casts, matrix products, adapters, dropout and norms.

The saved tensors follow from torch's derivatives.yaml, the order of frees from the code of transformers 5.17 and peft
0.21. The reference is trainer/memtrace/tracer.py, which runs that code itself.
"""

from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import Numerics, copies, family_spec, linears
from broker.estimator.memory.simulator.layers.norms import cohere_norm, gemma_norm, layer_norm, olmo_norm, rms_norm
from broker.estimator.memory.simulator.tape import Tape
from broker.estimator.memory.simulator.tensors import EARLIER, Tensor, Weight

NORMS = {"rms": rms_norm, "gemma": gemma_norm, "olmo": olmo_norm, "cohere": cohere_norm}


class LayerOps:
    """Tape, shape and weights of one layer over `rows` rows of `length` tokens, with its basic operations."""

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
            copy_count = copies(shape, role)
            self.weights[role] = Weight(inputs * outputs * copy_count, n.weight, trained=n.full, grad_width=n.trained)
            if role in n.adapted:
                for end, width in (("A", inputs), ("B", outputs)):
                    size = width * n.rank * copy_count
                    self.weights[role + end] = Weight(size, n.adapters, trained=True, grad_width=n.adapters)

    def free_casts(self) -> None:
        """Free the copies of weights that autocast kept, at its end."""
        for w in self.casts:
            assert w.cast is not None
            self.tape.drop(w.cast)
            w.cast = None
        self.casts.clear()

    def drop_presents(self) -> None:
        """Release the presents that the layer returned in addition to its output."""
        self.tape.drop(*self.presents)
        self.presents.clear()

    def matrix(self, x: Tensor, w: Weight, outputs: int) -> Tensor:
        """Return `x` times a matrix of this layer or of the head."""
        n, tape = self.numerics, self.tape
        into = self.tape.cast(x, n.compute) if n.autocast else self.tape.cast(x, max(x.width, w.width))
        copy = None
        if n.autocast and w.width != n.compute:
            copy = w.cast or tape.new(w.count, n.compute)
        product = tape.linear(into, w, self.tokens * outputs, copy)
        tape.drop(into)
        if copy is not None and w.cast is None:
            if self.build.cached_casts and w.trained:  # autocast caches copies of weights that need a gradient
                w.cast = copy
                self.casts.append(w)
            else:
                tape.drop(copy)
        return product

    def quantised(self, x: Tensor, count: int, outputs: int) -> Tensor:
        """Return `x` times a quantised matrix.

        bitsandbytes unpacks the matrix for each use; the result has the type of the input. Products with an 8-bit
        matrix are always computed in fp16.
        """
        width = 2 if self.numerics.bits == 8 else self.numerics.compute
        into = self.tape.cast(x, width)
        beside = count // 64 * 4 if self.numerics.bits == 4 else self.tokens * (x.count // self.tokens)
        unpacked = count * width + beside
        out = self.tape.kernel(into, self.tokens * outputs, width, scratch=unpacked, back=unpacked)
        self.tape.drop(into)
        result = self.tape.cast(out, x.width)
        self.tape.drop(out)
        return result

    def linear(self, x: Tensor, role: str) -> Tensor:
        """Return the output of one of the layer's linear modules, with its adapter."""
        inputs, outputs = self.sizes[role]
        w = self.weights[role]
        output = self.quantised(x, inputs * outputs, outputs) if self.numerics.bits else self.matrix(x, w, outputs)
        return self.adapt(x, output, role, outputs) if role in self.numerics.adapted else output

    def adapt(self, x: Tensor, base: Tensor, role: str, outputs: int) -> Tensor:
        """Add peft's LoRA, in the adapters' own type; under autocast in half precision."""
        n, tape = self.numerics, self.tape
        keeps_type = n.bits and n.autocast  # peft's bitsandbytes layers do not cast then
        into = self.tape.cast(x, x.width if keeps_type else n.adapters)
        dropped = self.dropout(into) if n.dropout else self.tape.cast(into, into.width)
        low = self.matrix(dropped, self.weights[role + "A"], n.rank)
        tape.drop(dropped)
        high = self.matrix(low, self.weights[role + "B"], outputs)
        tape.drop(low)
        scaled = tape.scale(high)
        tape.drop(high)
        added = tape.add(base, scaled)
        tape.drop(base, scaled, into)
        result = self.tape.cast(added, base.width)
        tape.drop(added)
        return result

    def dropout(self, x: Tensor) -> Tensor:
        """Apply dropout, which saves its mask."""
        return self.tape.dropout(x, self.numerics.mask or x.width)

    def norm(self, x: Tensor, parts: int = 1) -> Tensor:
        """Normalise `x`. `parts`: heads of a row that are normalised separately."""
        rows, n = self.tokens * parts, self.numerics
        weight = self.norm_weight(x.count // rows)
        if n.fused:
            return self.tape.layer_norm(x, weight, rows)
        if self.build.norm == "layer":
            return layer_norm(self.tape, x, weight, rows, autocast=n.autocast)
        return NORMS[self.build.norm](self.tape, x, weight, rows)

    def norm_weight(self, count: int) -> Weight:
        """Return the weight of a norm over `count` elements."""
        n = self.numerics
        return Weight(count, 4 if n.norms_float32 or n.rest_float32 else n.weight, trained=n.full, grad_width=n.trained)


def _weights(layer: LayerOps, role: str, inputs: int, outputs: int, *, accumulated: bool) -> None:
    n = layer.numerics
    for end, width in (("A", inputs), ("B", outputs)):
        weight = Weight(width * n.rank, n.adapters, trained=True, grad_width=n.adapters)
        weight.gradient = EARLIER if accumulated else None
        layer.weights[role + end] = weight


def adapt_head(layer: LayerOps, x: Tensor, logits: Tensor, *, accumulated: bool) -> Tensor:
    """Add the head's adapter; consumes the logits."""
    vocabulary = layer.shape.vocabulary
    _weights(layer, "head", layer.shape.hidden, vocabulary, accumulated=accumulated)
    return layer.adapt(x, logits, "head", vocabulary)


def adapt_embeddings(layer: LayerOps, x: Tensor, *, accumulated: bool) -> Tensor:
    """Add the adapter of the embeddings; consumes `x`.

    Peft looks up rows of the first matrix and multiplies them by the second, without dropout.
    """
    tape, n, hidden = layer.tape, layer.numerics, layer.shape.hidden
    _weights(layer, "embeddings", layer.shape.vocabulary, hidden, accumulated=accumulated)
    first = layer.weights["embeddingsA"]
    low = tape.lookup(first, layer.tokens * n.rank)
    high = layer.matrix(low, layer.weights["embeddingsB"], hidden)
    tape.drop(low)
    scaled = tape.after(high, tape.scale(high))
    added = tape.add(x, scaled, width=x.width)
    tape.drop(x, scaled)
    return added

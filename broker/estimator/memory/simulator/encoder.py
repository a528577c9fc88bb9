"""Simulated step of an encoder with a head: BERT and its relatives over texts, ViT over images."""

from broker.estimator.architecture.families import family_spec
from broker.estimator.memory.simulator.decoder import DecoderSimulator
from broker.estimator.memory.simulator.loss_forms import ClassLoss
from broker.estimator.memory.simulator.tensors import EARLIER, Tensor, Weight


class EncoderSimulator(DecoderSimulator):
    """Step of an encoder; the head reads the first token, or every token.

    Word embeddings are summed and normalised; image patches are multiplied by a matrix.
    """

    def _weight(self, count: int, *, whole: bool = False) -> Weight:
        """Return a weight. `whole`: it belongs to a head, which is trained in a LoRA too."""
        n = self.step.numerics
        width = n.weight if n.full or not whole else n.adapters
        weight = Weight(count, width, trained=n.full or whole, grad_width=n.trained if n.full else n.adapters)
        if self.step.accumulated:
            weight.gradient = EARLIER
        return weight

    def _embed(self) -> tuple[Tensor, Tensor]:
        s = self.shape
        self.head_ops = self._ops(self.tape)
        if self.step.accumulated:
            self.embedding.gradient = EARLIER
        x = self._patches() if s.pixels else self._words()
        return x, self.tape.hold(x)

    def _words(self) -> Tensor:
        """Return the sum of word, type and position embeddings after norm and dropout."""
        tape, s, count = self.tape, self.shape, self.tokens * self.shape.hidden
        self.batch = tape.new(self.tokens * 3, 8)  # token ids, their mask, and labels or positions
        x = tape.lookup(self.embedding, count)
        # the embedding requires a gradient, the norm does not
        if not self.step.numerics.full and self.step.checkpointing:
            x.grad = True
            x.retain()
        named = [self.tape.hold(x)]
        for number, rows in enumerate(s.looked_up):
            wide = count if number else self.step.length * s.hidden
            more = tape.lookup(self._weight(rows * s.hidden), wide)
            x = self.tape.after(x, tape.add(x, more))
            named.append(more)
        x = self._dropped(self.tape.after(x, self.head_ops.norm(x)))
        tape.drop(*named)
        return x

    def _patches(self) -> Tensor:
        """Return pixels times a matrix, after the first token, plus positions."""
        tape, s, n = self.tape, self.shape, self.step.numerics
        pixels = self.batch = tape.new(self.step.rows * s.pixels, 4)
        matrix = self._weight(s.vocabulary * s.hidden)  # one number for each number of a patch
        patches = self.tokens - self.step.rows
        self.named = tape.cast(pixels, n.weight)  # a variable of the model holds it until the model returns
        into = tape.cast(self.named, n.compute)
        copy = tape.new(matrix.count, n.compute) if n.autocast and n.weight != n.compute else None
        x = tape.convolution(into, matrix, patches * s.hidden, copy)
        tape.drop(into, *([] if copy is None else [copy]))
        if self.step.checkpointing and not n.full:
            x.grad = True
            x.retain()
        x = self.tape.after(x, tape.resize(x, self.tokens * s.hidden, max(x.width, n.weight)))
        position = self._weight(self.step.length * s.hidden)
        x = tape.after(x, tape.add_weight(x, position, n.weight))
        if s.dropout:
            x = self._dropped(x)
        return x

    def _dropped(self, x: Tensor) -> Tensor:
        return self.tape.after(x, self.head_ops.dropout(x)) if self.shape.dropout else x

    def _logits(self, x: Tensor, first: Tensor) -> tuple[Tensor, int]:
        """Return class logits for every token, or for the first token after a dense layer."""
        tape, n, s = self.tape, self.step.numerics, self.shape
        ops, rows, h = self.head_ops, self.step.rows, s.hidden
        self.leaving, mark = x, len(tape.nodes)
        if not family_spec(s).norm_after:
            x = self.tape.after(x, ops.norm(x))
        if s.pixels:
            tape.drop(self.named)
        if s.head == "words":
            x = self._dropped(x)
        else:
            ops.tokens = rows
            x = self.tape.after(x, tape.resize(x, rows * h))
        if s.head == "text":
            whole = not s.pooled_adapter
            dense = ops.matrix(x, self._weight(h * h, whole=whole), h)
            if "pooler" in n.adapted:
                for role, (inputs, outputs) in {"A": (h, n.rank), "B": (n.rank, h)}.items():
                    ops.weights[f"pool{role}"] = Weight(
                        inputs * outputs, n.adapters, trained=True, grad_width=n.adapters
                    )
                dense = ops.adapt(x, dense, "pool", h)
            x = self.tape.after(x, tape.elementwise_by_result(dense))
            tape.drop(dense)
            x = self._dropped(x)
        logits = ops.matrix(x, self._weight(h * s.labels, whole=True), s.labels)
        tape.drop(x, first, self.mask)
        self.normed = logits
        return logits, mark

    def _loss(self, logits: Tensor) -> Tensor:
        """Return the loss of a few classes; consumes the logits."""
        self._free_on_return()
        loss = ClassLoss().loss(self.tape, logits, length=1, autocast=self.step.numerics.autocast)
        self.tape.drop(self.batch)
        return loss

"""Simulated step of a decoder whose head predicts classes, or one number, instead of the next token."""

from broker.estimator.memory.simulator.decoder import DecoderSimulator
from broker.estimator.memory.simulator.loss_forms import ClassLoss
from broker.estimator.memory.simulator.tensors import EARLIER, Tensor, Weight


class ClassifierSimulator(DecoderSimulator):
    """Step of a classifier. The head reads every token; a text classifier uses the logits of the last token."""

    def _embed(self) -> tuple[Tensor, Tensor]:
        if self.step.accumulated:  # no other matrix shares its gradient
            self.embedding.gradient = EARLIER
        self.batch = self.tape.new(self.tokens * 2, 8)  # token ids and their mask
        return super()._embed()

    def _logits(self, x: Tensor, first: Tensor) -> tuple[Tensor, int]:
        tape, s, n = self.tape, self.shape, self.step.numerics
        self.head_ops = ops = self._ops(tape)
        self.leaving, mark = x, len(tape.nodes)
        normed = ops.norm(x)
        tape.drop(x, first, self.mask)
        if s.head == "words":
            normed = tape.after(normed, ops.dropout(normed))
        count = s.hidden * s.labels
        width = n.weight if n.full else n.adapters
        head = Weight(count, width, trained=True, grad_width=n.trained if n.full else width)
        head.gradient = EARLIER if self.step.accumulated else None
        logits = ops.matrix(normed, head, s.labels)
        tape.drop(normed)
        if s.head == "text":
            logits = tape.after(logits, tape.resize(logits, self.step.rows * s.labels))
        return logits, mark

    def _loss(self, logits: Tensor) -> Tensor:
        """Return the loss of a few classes; consumes the logits."""
        self._free_on_return()
        loss = ClassLoss().loss(self.tape, logits, length=1, autocast=self.step.numerics.autocast)
        self.tape.drop(self.batch)
        return loss

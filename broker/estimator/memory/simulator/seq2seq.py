"""Simulated step of an encoder-decoder: source through the encoder, target through the decoder, then backward."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import stacks
from broker.estimator.memory.simulator.decoder import DecoderSimulator
from broker.estimator.memory.simulator.layer_sampling import Depth
from broker.estimator.memory.simulator.layers.decoder_layer import Layer
from broker.estimator.memory.simulator.layers.seq2seq_layer import Seq2SeqLayer, Seq2SeqOps, Shared
from broker.estimator.memory.simulator.tape import Tape
from broker.estimator.memory.simulator.tensors import EARLIER, Tensor, Weight
from broker.estimator.memory.simulator.types import Bytes, Step, StepPeak


@dataclass(kw_only=True)
class _Stack:
    """State of one of the two stacks during the simulation."""

    shape: ModelShape
    depth: Depth
    prefix: str
    """Name of the stack with a trailing space, in the names of segments."""
    length: int
    shared: Shared
    layers: list[Layer] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    named: list[Tensor] = field(default_factory=list)
    """Tensors that Python variables hold until the stack returns."""

    forward_residue: dict[int, Bytes] = field(default_factory=dict)
    backward_residue: dict[int, Bytes] = field(default_factory=dict)


class Seq2SeqSimulator(DecoderSimulator):
    """Step of an encoder-decoder, with three simulated layers in each stack.

    Both stacks read one word table; a tied head reads it too.
    """

    def __init__(self, shape: ModelShape, step: Step) -> None:
        super().__init__(shape, step)
        encoder, decoder = stacks(shape)
        self.encoder, self.decoder = (
            _Stack(shape=s, depth=Depth.of(s, 0, sdpa=False), prefix=prefix, length=length, shared=Shared(biases={}))
            for s, prefix, length in ((encoder, "encoder ", step.length), (decoder, "decoder ", step.target))
        )
        self.stack = self.encoder
        self.embedding.gradient = None  # two stacks read it, and the gradient exists once both have contributed

    def run(self) -> StepPeak:
        """Return the worst moment of every segment."""
        tape = self.tape
        tape.begin_segment("forward embeddings", "activations")
        self._allocate_states()
        self.batch = tape.new(self.step.rows * 2 * (self.step.length + self.step.target), 8)
        x = self._through(self.encoder)
        tape.begin_segment("forward between", "activations")
        first, between = x, len(tape.nodes)
        self.decoder.shared.source = self._finished(x)
        x = self._through(self.decoder)
        tape.begin_segment("forward head", "logits")
        head, self.leaving = len(tape.nodes), x
        loss = self._loss(self._scores(self._finished(x)))
        tape.begin_segment("backward head", "logits")
        loss.gradient = tape.new(1, 4)
        tape.drop(loss)
        tape.backward(head)
        self._back_through(self.decoder)
        tape.begin_segment("backward between", "temporary")
        tape.backward(between)
        self.leaving = first
        self._back_through(self.encoder)
        tape.begin_segment("backward embeddings", "temporary")
        tape.backward()
        self._reduce_gradients()
        self._update()
        return StepPeak(segments={name: self._spread(name, by) for name, by in self._segments()}, trained=self.trained)

    def _segments(self) -> Iterator[tuple[str, Bytes]]:
        every = dict(self.tape.peaks)
        for stack in (self.encoder, self.decoder):
            self._enter(stack)
            self.tape.peaks = {name: peak for name, peak in every.items() if stack.prefix in name}
            yield from super()._segments()
        yield from ((name, by) for name, (_, by) in every.items() if not name[-1].isdigit())

    def _allocate_states(self) -> None:
        super()._allocate_states()
        if not self.shape.buckets:  # BART's bias of the logits, which is not a parameter
            self.tape.adjust("weights", self.shape.vocabulary * self.step.numerics.weight)

    def _enter(self, stack: _Stack) -> None:
        self.stack, self.prefix, self.depth, self.last = (
            stack,
            stack.prefix,
            stack.depth,
            len(stack.depth.simulated) - 1,
        )
        self.layers, self.inputs, self.marks = stack.layers, stack.inputs, stack.marks
        self.forward_residue, self.backward_residue, self.probed = stack.forward_residue, stack.backward_residue, {}

    def _through(self, stack: _Stack) -> Tensor:
        """Run the embeddings and layers of one stack."""
        self._enter(stack)
        x = self._words(stack)
        for number in range(self.last + 1):
            if self.step.checkpointing:
                for t in self._checkpoint_extras(stack, number):
                    t.retain()
            x = self._forward(number, x)
        return x

    def _checkpoint_extras(self, stack: _Stack, number: int) -> list[Tensor]:
        """Return the tensors that a checkpointed layer saves in addition to its input.

        The first layer computes the biases itself, so it saves only the encoder's output.
        """
        return [t for t in stack.shared.tensors if number or t is stack.shared.source]

    def _back_through(self, stack: _Stack) -> None:
        self._enter(stack)
        for number in range(self.last, -1, -1):
            self._backward(number)
            if self.step.checkpointing:
                self.tape.drop(*self._checkpoint_extras(stack, number))

    def _ops(self, tape: Tape, *, masked: bool = False) -> Seq2SeqOps:
        return Seq2SeqOps(tape, self.stack.shape, self.step.numerics, self.step.rows, self.stack.length)

    def _fresh(self, tape: Tape, shared: Shared, *, first: bool) -> Seq2SeqLayer:
        return Seq2SeqLayer(self._ops(tape), shared, first=first, learnt=self.step.checkpointing)

    def _layer(self, number: int) -> Layer:
        layer = self._fresh(self.tape, self.stack.shared, first=not number)
        if self.step.accumulated:
            for w in layer.ops.weights.values():
                w.gradient = EARLIER
        return layer

    def _alone(self, tape: Tape, masked: bool) -> Layer:
        def copied(t: Tensor) -> Tensor:
            return tape.new(t.count, t.width, grad=t.grad)

        own = self.stack.shared
        biases = {kind: copied(t) for kind, t in own.biases.items()}
        return self._fresh(tape, Shared(source=own.source and copied(own.source), biases=biases), first=False)

    def _words(self, stack: _Stack) -> Tensor:
        """Return the embeddings; BART's with positions and a norm."""
        tape, n, h = self.tape, self.step.numerics, self.shape.hidden
        count = self.step.rows * stack.length * h
        self.head_ops = ops = self._ops(tape)
        x = tape.lookup(self.embedding, count)
        if not self.shape.buckets:
            x = tape.after(x, tape.scale(x))
        if self.step.checkpointing and not n.full:  # x is set to require a gradient, so the graph holds it to the end
            x.grad = True
            x.retain()
        stack.named.append(tape.hold(x))
        if not self.shape.buckets:
            rows = Weight(self.shape.looked_up[0] * h, n.weight, trained=n.full, grad_width=n.trained)
            places = tape.lookup(rows, count if stack is self.encoder else stack.length * h)
            x = tape.after(x, tape.add(x, places))
            stack.named.append(places)
            x = tape.after(x, ops.norm(x))
        return tape.after(x, ops.dropout(x)) if self.shape.dropout else x

    def _finished(self, x: Tensor) -> Tensor:
        """Return the stack's output and consume that of its last layer. T5 applies a norm and dropout."""
        ops = self.head_ops
        if self.shape.buckets:
            x = self.tape.after(x, ops.norm(x))
            x = self.tape.after(x, ops.dropout(x)) if self.shape.dropout else x
        self.tape.drop(*self.stack.named, *self.stack.shared.biases.values())
        return x

    def _scores(self, x: Tensor) -> Tensor:
        """Return logits over the vocabulary; consumes its input and the encoder's output."""
        tape, ops, source = self.tape, self.head_ops, self.decoder.shared.source
        assert source is not None
        into = tape.scale(x) if self.shape.tied_embeddings and self.shape.buckets else tape.hold(x)
        ops.tokens = self.step.rows * self.step.target
        logits = ops.matrix(into, self.head, self.shape.vocabulary)
        if not self.shape.buckets:
            width = max(logits.width, self.step.numerics.weight)
            logits = tape.after(logits, tape.add(logits, width=width))
        tape.drop(x, into, source)
        self.normed = logits
        return logits

    def _free_on_return(self) -> None:
        """Free the copies of weights that autocast kept in both stacks."""
        for stack in (self.encoder, self.decoder):
            self.layers, self.depth, self.last = stack.layers, stack.depth, len(stack.depth.simulated) - 1
            super()._free_on_return()

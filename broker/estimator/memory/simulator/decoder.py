"""Peak memory of one optimizer step: forward pass, loss, backward pass and optimizer.

Three layers are simulated. The middle layer represents all layers between the first and the last, because the peak of
every segment is linear in their number. If only some layers need a mask, one layer of each kind is simulated.
"""

from collections.abc import Iterator

from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import family_spec, layer_matrices
from broker.estimator.architecture.model_states import base_bytes, exchanged, optimizer_bytes, trained_parameters
from broker.estimator.memory.simulator.fsdp import sharding_of
from broker.estimator.memory.simulator.layer_sampling import Depth
from broker.estimator.memory.simulator.layers.decoder_layer import Layer
from broker.estimator.memory.simulator.layers.layer_ops import LayerOps, adapt_embeddings, adapt_head
from broker.estimator.memory.simulator.loss_forms import ChunkedLoss
from broker.estimator.memory.simulator.tape import Tape
from broker.estimator.memory.simulator.tensors import CATEGORIES, EARLIER, Tensor, Weight
from broker.estimator.memory.simulator.types import Bytes, Step, StepPeak


class DecoderSimulator:
    """Simulated step of a decoder, whose last hidden states become logits over the vocabulary."""

    def __init__(self, shape: ModelShape, step: Step) -> None:
        self.shape, self.asked, self.step, self.tape = shape, step, step.gathered, Tape()
        self.layers: list[Layer] = []
        self.inputs: list[Tensor] = []
        self.marks: list[int] = []
        step, n = self.step, self.step.numerics
        self.depth = Depth.of(shape, step.length, sdpa=n.attention == "sdpa")
        self.last = len(self.depth.simulated) - 1
        self.tokens = step.rows * step.length
        self.trained = step.trained or trained_parameters(shape, n)
        self.sharding = sharding_of(shape, self.asked, self.trained, self.tape)
        matrix = shape.vocabulary * shape.hidden
        width = 4 if n.rest_float32 else n.weight
        self.embedding = Weight(matrix, width, trained=n.full, grad_width=n.trained)
        self.head = self.embedding if shape.tied_embeddings else Weight(
            matrix, width, trained=n.full, grad_width=n.trained
        )  # fmt: skip
        # With tied embeddings the head's gradient exists first; the gradient of the lookup is added to it.
        if step.accumulated and not shape.tied_embeddings:
            self.embedding.gradient = self.head.gradient = EARLIER
        self.forward_residue: dict[int, Bytes] = {}
        self.backward_residue: dict[int, Bytes] = {}
        """Bytes that each simulated middle layer leaves behind in its forward and its backward pass, by layer."""
        self.probed: dict[tuple[bool, int], tuple[int, int]] = {}
        self.other_chunks = 0
        """Bytes of the logits' other parts, if head and loss are computed in parts."""
        self.ends: LayerOps | None = None
        """Operations of the embeddings' adapter; None: the embeddings have no adapter."""
        self.prefix = ""
        """Name of the simulated stack with a trailing space, if the model has several stacks; otherwise empty."""

    def run(self) -> StepPeak:
        tape = self.tape
        tape.begin_segment("forward embeddings", "activations")
        self._allocate_states()
        self.sharding.gather_root()
        x, first = self._embed()
        self.mask = self._mask()
        for number in range(self.last + 1):
            x = self._forward(number, x)
        tape.begin_segment("forward head", "logits")
        logits, mark = self._logits(x, first)
        end = len(tape.nodes)
        self.sharding.free_root()
        loss = self._loss(logits)
        tape.begin_segment("backward head", "logits")
        loss.gradient = tape.new(1, 4)
        tape.drop(loss)
        tape.backward(end)
        self.sharding.gather_last_layer()
        tape.backward(mark)
        tape.adjust("logits", -self.other_chunks)
        for number in range(self.last, -1, -1):
            self._backward(number)
        tape.begin_segment("backward embeddings", "temporary")
        if self.step.checkpointing:  # the arguments of checkpointed layers hold the mask
            tape.drop(self.mask)
        self.sharding.reduce()
        tape.backward()
        self.sharding.reduce_root()
        self._reduce_gradients()
        self._update()
        return StepPeak(segments={name: self._spread(name, by) for name, by in self._segments()}, trained=self.trained)

    def _segments(self) -> Iterator[tuple[str, Bytes]]:
        """Yield (name, bytes) of each segment, named by its place in the whole model."""
        ends = {0: "first layer", self.last: "last layer"}
        for name, (_, by) in self.tape.peaks.items():
            direction, _, number = name.rpartition(" ")
            if not number.isdigit():
                yield name, by
            elif int(number) in ends:
                yield f"{direction} {ends[int(number)]}", by
            else:
                yield from self._between(direction, int(number), by)

    def _between(self, direction: str, number: int, worst: Bytes) -> Iterator[tuple[str, Bytes]]:
        """Yield the segments of the represented layers that run after the most and after the fewest other layers."""
        forward = direction.startswith("forward")
        left = self.forward_residue if forward else self.backward_residue
        for place, ahead in self.depth.extremes(number, forward=forward):
            by = {c: worst[c] + sum(left[other][c] * n for other, n in ahead.items()) for c in CATEGORIES}
            yield f"{direction} {place} layer", by

    def _allocate_states(self) -> None:
        step, n = self.asked, self.asked.numerics
        adapters = 0 if n.full else self.trained * n.trained
        states, _ = optimizer_bytes(step.optimizer, step.numerics.trained, self.trained, step.whole_states)
        base = self.shape.parameters * n.trained if step.masters else base_bytes(self.shape, n)
        if family_spec(self.shape).mask_buffer:
            self.tape.adjust("weights", (self.shape.max_positions or 0) ** 2)
        self.tape.adjust("weights", step.share(base + adapters) + step.tables)
        self.tape.adjust("optimizer", step.share(states))
        if n.bits == 4:  # the scales of a quantised base are not sharded
            scales = self.shape.layers * layer_matrices(self.shape) // 64
            self.tape.adjust("weights", scales - step.share(scales))
        if step.accumulated:
            self.tape.adjust("gradients", step.share(self.trained * n.trained))
        self.reduced = self.tape.live["gradients"]

    def _embed(self) -> tuple[Tensor, Tensor]:
        """Return (the first layer's input, the embeddings). A variable of the model holds the embeddings to the end."""
        step, n, tape, build = self.step, self.step.numerics, self.tape, family_spec(self.shape)
        grad = n.full or step.checkpointing
        count = self.tokens * self.shape.hidden
        x = tape.lookup(self.embedding, count, n.trained)
        if "embeddings" in n.adapted:
            self.ends = self._ops(tape)
            x, grad = adapt_embeddings(self.ends, x, accumulated=step.accumulated), False
        if build.scaled_embeddings and not build.scaled:  # inside the embedding module
            x = tape.after(x, tape.scale(x))
        if grad and not n.full:  # x is set to require a gradient, so the graph holds it to the end
            x.grad = True
            x.retain()
        if build.scaled:
            x = tape.after(x, tape.scale(x))
        first = tape.hold(x)
        if not build.rotary:  # learned positions
            rows = (self.shape.max_positions or step.length) * self.shape.hidden
            positions = Weight(rows, n.weight, trained=n.full, grad_width=n.trained)
            positions.gradient = EARLIER if step.accumulated else None
            x = tape.after(x, tape.add_weight(x, positions, n.trained))
        if self.shape.dropout and not build.rotary:
            x = tape.after(x, tape.dropout(x, n.mask or x.width))
        return x, first

    def _mask(self) -> Tensor:
        """Return the mask of all layers, a byte for each pair of tokens. The model holds it through the forward pass.

        The models' own attention adds a mask in the type of the embeddings, one for each kind of layer.
        """
        n, pairs = self.step.numerics, self.step.length**2 * self.step.rows
        if n.attention == "eager" and not family_spec(self.shape).encoder:
            mask = self.tape.new(pairs * max(1, len({*self.shape.windowed})), n.weight)
        else:
            mask = self.tape.new(pairs if any(self.depth.simulated) else 0, 1)
        if self.step.checkpointing:
            mask.retain()
        return mask

    def _ops(self, tape: Tape, *, masked: bool = False) -> LayerOps:
        """Return the operations of a layer, of the embeddings or of the head."""
        return LayerOps(tape, self.shape, self.step.numerics, self.step.rows, self.step.length, masked=masked)

    def _layer(self, number: int) -> Layer:
        masked = self.depth.simulated[number]
        layer = Layer(self._ops(self.tape, masked=masked))
        if self.step.accumulated:
            for w in layer.ops.weights.values():
                w.gradient = EARLIER
        return layer

    def _forward(self, number: int, x: Tensor) -> Tensor:
        tape = self.tape
        tape.begin_segment(f"forward {self.prefix}{number}", "activations")
        self.sharding.gather()
        before = dict(tape.live)
        layer = self._layer(number)
        self.layers.append(layer)
        self.marks.append(len(tape.nodes))
        self.inputs.append(x)
        if self.step.checkpointing:
            x.retain()
            tape.recording = False
        y = layer(x)
        tape.recording = True
        self.sharding.free_layer()
        tape.drop(x)
        if 0 < number < self.last:
            self.forward_residue[number] = self._live_change(before)
            tape.repeat(self.forward_residue[number], self.depth.others(number))
        return y

    def _live_change(self, before: Bytes) -> Bytes:
        """Return the change of live bytes; communication counts as 0, because it is equal before every layer."""
        return {c: 0 if c == "communication" else self.tape.live[c] - before[c] for c in CATEGORIES}

    def _free_on_return(self) -> None:
        """Free autocast's copies that the graph does not hold, and the layers' presents, when the model returns."""
        ends = [self.head_ops] if self.ends is None else [self.head_ops, self.ends]
        for number, ops in enumerate((*(layer.ops for layer in self.layers), *ends)):
            before = dict(self.tape.live)
            ops.free_casts()
            ops.drop_presents()
            if 0 < number < self.last:
                self.tape.repeat(self._live_change(before), self.depth.others(number))

    def _logits(self, x: Tensor, first: Tensor) -> tuple[Tensor, int]:
        tape, n = self.tape, self.step.numerics
        self.head_ops = ops = self._ops(tape)
        self.leaving, mark = x, len(tape.nodes)
        normed = ops.norm(x)
        tape.drop(x, first, self.mask)
        logits = self._head(ops, normed)
        if "head" in n.adapted:
            logits = adapt_head(ops, normed, logits, accumulated=self.step.accumulated)
        self.normed = normed
        if not self.step.loss.in_model:
            tape.drop(normed)
        if family_spec(self.shape).scaled or family_spec(self.shape).scaled_logits:
            logits = tape.after(logits, tape.scale(logits))
        if self.shape.softcap:
            logits = tape.after(logits, tape.scale(logits))
            logits = tape.after(logits, tape.elementwise_by_result(logits))
            logits = tape.after(logits, tape.scale(logits))
        return logits, mark

    def _head(self, ops: LayerOps, normed: Tensor) -> Tensor:
        """Return the logits, or one part of them if head and loss are computed in parts."""
        vocabulary, form = self.shape.vocabulary, self.step.loss
        if isinstance(form, ChunkedLoss):
            self.other_chunks = form.others(self.tokens * vocabulary)
            ops.tokens = -(-self.tokens // form.chunks)
        if self.step.numerics.head_bits:
            return ops.quantised(normed, self.head.count, vocabulary)
        return ops.matrix(normed, self.head, vocabulary)

    def _loss(self, logits: Tensor) -> Tensor:
        """Return the loss; consumes the logits."""
        self.tape.adjust("logits", self.other_chunks)
        form, autocast = self.step.loss, self.step.numerics.autocast
        if not form.in_model:
            self._free_on_return()
        loss = form.loss(self.tape, logits, length=self.step.length, autocast=autocast)
        if form.in_model:
            self.tape.drop(self.normed)
            self._free_on_return()
        return loss

    def _backward(self, number: int) -> None:
        tape = self.tape
        tape.begin_segment(f"backward {self.prefix}{number}", "temporary")
        self.sharding.gather_back(ahead=number > 0)
        before = dict(tape.live)
        if self.step.checkpointing:
            self._recompute(number)
        else:
            tape.backward(self.marks[number])
        self.leaving = self.inputs[number]
        self._reduce_gradients()
        if number > 0:
            self.sharding.reduce()
        if 0 < number < self.last:
            self.backward_residue[number] = self._live_change(before)
            tape.repeat(self.backward_residue[number], self.depth.others(number))
            self.reduced = tape.live["gradients"]

    def _recompute(self, number: int) -> None:
        """Recompute a checkpointed layer and run its backward pass."""
        tape, step, x, layer = self.tape, self.step, self.inputs[number], self.layers[number]
        out, mark = self.leaving, len(tape.nodes)
        ahead, stop = (0, None) if step.reentrant else self._probe(self.depth.simulated[number], x)
        tape.adjust("temporary", ahead)
        tape.category = "activations"
        inner = Tensor(x.count, x.width, x.category, x.grad, base=x)
        tape.operations, tape.stop, tape.unpacks = 0, stop, not step.reentrant
        y = layer(inner)
        tape.stop, tape.unpacks = None, False
        layer.ops.free_casts()
        tape.category = "temporary"
        tape.adjust("temporary", -ahead)
        y.gradient, out.gradient = out.gradient, None
        # The reentrant form's own backward function holds the recomputed output and its gradient until it returns.
        named = [t for t in (y, y.gradient) if t is not None] if step.reentrant else []
        for t in named:
            t.retain()
        tape.drop(y)
        tape.backward(mark)
        tape.drop(*named)
        layer.ops.drop_presents()
        x.gradient, inner.gradient = inner.gradient, None
        if not step.hooked:
            tape.drop(x)
        elif step.reentrant and x.gradient is not None:
            x.gradient.retain()

    def _probe(self, masked: bool, x: Tensor) -> tuple[int, int]:
        """Return (bytes of early gradients, operation at which recomputation stops) of a checkpointed layer.

        The backward pass of the layer makes these gradients before it first needs a saved tensor and recomputes the
        layer. The result depends on the width of the inputs: float32 inputs need no cast, so there is one operation
        less.
        """
        if (kind := (masked, x.width)) not in self.probed:
            tape = Tape()
            tape.begin_segment("ahead", "temporary")
            y = self._alone(tape, masked)(tape.new(x.count, x.width, grad=True))
            y.gradient = tape.new(y.count, y.width)
            tape.drop(y)
            before = tape.total
            tape.backward_until_saved()
            self.probed[kind] = max(0, tape.total - before), tape.last_saving
        return self.probed[kind]

    def _alone(self, tape: Tape, masked: bool) -> Layer:
        """Return a middle layer on its own tape."""
        return Layer(self._ops(tape, masked=masked))

    def _reduce_gradients(self) -> None:
        """Sum a layer's gradients over the devices and keep only this device's shard (FSDP 1)."""
        if self.asked.divided:
            return
        unsharded = self.tape.live["gradients"] - self.reduced
        self.tape.repeat({"gradients": self.step.share(unsharded) - unsharded}, 1)
        self.reduced = self.tape.live["gradients"]

    def _update(self) -> None:
        step, tape = self.asked, self.tape
        _, scratch = optimizer_bytes(step.optimizer, step.numerics.trained, self.trained)
        tape.begin_segment("optimizer", "temporary")
        gradients = step.share(self.trained * step.numerics.trained)
        if step.optimizer == "adafactor":
            largest = max(self.embedding.count if step.numerics.full else 0, *(
                w.count for w in self.layers[0].ops.weights.values() if w.trained
            ))  # fmt: skip
            scratch = 12 * largest
        tape.adjust("gradients", gradients - tape.live["gradients"])
        tape.adjust("temporary", step.share(scratch))

    def _spread(self, name: str, by: Bytes) -> Bytes:
        """Return the bytes plus the buffers for communication. The buckets of DDP are as large as the gradients."""
        step, n = self.asked, self.asked.numerics
        if step.shards == 1:
            return {**by, "communication": self.trained * n.trained} if step.replicas > 1 else by
        if step.divided:
            return by
        return {**by, "communication": exchanged(self.shape, n, name, ahead=not step.hooked)}

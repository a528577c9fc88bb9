"""LoRA adapters at the ends of a decoder: on its embeddings, and on the head that makes logits."""

from broker.estimator.memory.simulator.decoder_layer import Layer
from broker.estimator.memory.simulator.tape import EARLIER, Tensor, Weight


def _weights(layer: Layer, role: str, inputs: int, outputs: int, *, accumulated: bool) -> None:
    n = layer.numerics
    for end, width in (("A", inputs), ("B", outputs)):
        weight = Weight(width * n.rank, n.adapters, trained=True, grad_width=n.adapters)
        weight.gradient = EARLIER if accumulated else None
        layer.weights[role + end] = weight


def adapt_head(layer: Layer, x: Tensor, logits: Tensor, *, accumulated: bool) -> Tensor:
    """Add the head's adapter; consumes the logits."""
    vocabulary = layer.shape.vocabulary
    _weights(layer, "head", layer.shape.hidden, vocabulary, accumulated=accumulated)
    return layer.adapt(x, logits, "head", vocabulary)


def adapt_embeddings(layer: Layer, x: Tensor, *, accumulated: bool) -> Tensor:
    """Add the adapter of the embeddings; consumes `x`.

    Peft looks up rows of the first matrix and multiplies them by the second, without dropout.
    """
    tape, n, hidden = layer.tape, layer.numerics, layer.shape.hidden
    _weights(layer, "embeddings", layer.shape.vocabulary, hidden, accumulated=accumulated)
    first = layer.weights["embeddingsA"]
    low = tape.op((), layer.tokens * n.rank, n.adapters, weights=[(first, n.adapters)])
    high = layer.matrix(low, layer.weights["embeddingsB"], hidden)
    tape.drop(low)
    scaled = tape.after(high, tape.op([high], high.count, high.width))
    added = tape.op([x, scaled], x.count, x.width, passthrough_grad=True)
    tape.drop(x, scaled)
    return added

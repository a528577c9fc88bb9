"""Memory that activations keep: as multiples of their input, and compared with what torch itself saves."""

import pytest

from broker.estimator.memory.simulator.layers.activations import activate
from broker.estimator.memory.simulator.tape import Tape
from broker.model_catalog.config_validation import ACTIVATIONS

KEPT = {
    "gelu": 2, "gelu_10": 3, "gelu_accurate": 5, "gelu_fast": 8, "gelu_new": 5, "gelu_python": 4, "gelu_python_tanh": 5,
    "gelu_pytorch_tanh": 2, "hardswish": 2, "laplace": 2, "leaky_relu": 2, "linear": 1, "mish": 2, "prelu": 2,
    "quick_gelu": 3, "relu": 1, "relu2": 2, "relu6": 2, "sigmoid": 1, "silu": 2, "sqrtsoftplus": 2, "swish": 2,
    "tanh": 1, "xielu": 5.25,
}  # fmt: skip
"""Multiples of the input in float32, with the result."""
RAISED = {"gelu_accurate": 9, "gelu_new": 9, "gelu_python_tanh": 9, "relu2": 5, "sqrtsoftplus": 4, "xielu": 9.5}
"""Multiples in half precision under autocast, if they differ from those in float32."""
COUNT = 512 * 64


@pytest.mark.parametrize("kind", sorted(ACTIVATIONS))
@pytest.mark.parametrize("autocast", [False, True])
def test_each_activation_frees_what_it_saved(kind: str, autocast: bool) -> None:
    tape, width = Tape(), 2 if autocast else 4
    tape.begin_segment("all", "activations")
    x = tape.new(COUNT, width, grad=True)
    y = activate(tape, x, kind, autocast=autocast)
    tape.drop(x)
    assert tape.total == COUNT * width * ((RAISED if autocast else {}).get(kind, KEPT[kind]))
    y.gradient = tape.new(y.count, y.width)
    tape.drop(y)
    tape.backward()
    assert tape.total == COUNT * width, "the gradient of what was given is left"


def test_activations_save_as_much_as_in_torch() -> None:
    """Storages that torch's graph holds are counted with the result. Slopes of prelu and xielu are a few numbers."""
    torch = pytest.importorskip("torch")
    functions = pytest.importorskip("transformers.activations").ACT2FN
    for kind, times in KEPT.items():
        storages: dict[int, int] = {}

        def keep(t: object, storages: dict[int, int] = storages) -> object:
            storage = t.untyped_storage()  # type: ignore[attr-defined]
            storages[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            keep(functions[kind](torch.ones(COUNT, requires_grad=True) * 1))
        assert sum(storages.values()) == pytest.approx(times * COUNT * 4, abs=64), kind

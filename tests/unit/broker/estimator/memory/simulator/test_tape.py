"""The tape's rules are those of PyTorch's autograd and allocator."""

import contextlib
from collections.abc import Callable

import pytest

from broker.estimator.memory.simulator.tape import Tape
from broker.estimator.memory.simulator.tensors import BLOCK, EARLIER, Tensor, Weight

COUNT = 1024


def tape_in(segment: str = "all") -> Tape:
    tape = Tape()
    tape.begin_segment(segment, "activations")
    return tape


def test_sizes_are_rounded_up_to_the_allocators_blocks() -> None:
    tape = tape_in()
    t = tape.new(1, 4)
    assert tape.total == BLOCK
    tape.drop(t)
    assert tape.total == 0
    assert tape.peaks["all"][0] == BLOCK


def test_tensors_saved_for_backward_live_until_backward() -> None:
    tape = tape_in()
    x = tape.new(COUNT, 4, grad=True)
    y = tape.elementwise(x)
    tape.drop(x)
    assert tape.total == 2 * 4 * COUNT
    y.gradient = tape.new(COUNT, 4)
    tape.drop(y)
    tape.backward()
    assert tape.total == 4 * COUNT  # the gradient of x
    assert x.gradient is not None


def test_nothing_is_kept_for_what_needs_no_gradient() -> None:
    tape = tape_in()
    x = tape.new(COUNT, 4)
    y = tape.elementwise(x)
    tape.drop(x, y)
    assert tape.total == 0
    assert tape.nodes == []


def test_nothing_is_kept_while_checkpointing_does_not_record() -> None:
    tape = tape_in()
    x = tape.new(COUNT, 4, grad=True)
    tape.recording = False
    y = tape.elementwise(x)
    views = tape.split(y, (COUNT // 2, COUNT // 2))
    tape.drop(x, y, *views)
    assert tape.total == 0
    assert y.grad


def test_a_second_gradient_is_added_in_place_unless_the_first_is_shared() -> None:
    alone, shared = tape_in(), tape_in()
    for tape in (alone, shared):
        x = tape.new(COUNT, 4, grad=True)
        y = tape.scale(x)
        z = tape.add(x, y) if tape is shared else tape.where(tape.new(0, 1), x, y)
        z.gradient = tape.new(COUNT, 4)
        tape.drop(x, y, z)
        tape.begin_segment("backward", "temporary")
        tape.backward()
        assert tape.total == 4 * COUNT
        assert x.gradient is not None
    # alone: gradients of z, x and y; shared: one for z, x and y, then y's own for x while the sum is made
    assert alone.peaks["backward"][0] == 3 * 4 * COUNT
    assert shared.peaks["backward"][0] == 2 * 4 * COUNT


def test_a_sum_of_shared_gradients_is_a_tensor_of_its_own() -> None:
    tape = tape_in()
    x = tape.new(COUNT, 4, grad=True)
    residual = tape.add(x)
    z = tape.add(x, residual)
    held = z.gradient = tape.new(COUNT, 4)
    held.retain()
    tape.backward()
    assert x.gradient is not held
    assert x.gradient is not None


def test_a_gradient_changes_type_where_an_addition_did() -> None:
    tape = tape_in()
    half = tape.new(COUNT, 2, grad=True)
    wide = tape.new(COUNT, 4, grad=True)
    out = tape.add(half, wide)
    out.gradient = tape.new(COUNT, 4)
    tape.backward()
    assert half.gradient is not None
    assert half.gradient.width == 2
    assert wide.gradient is not None
    assert wide.gradient.width == 4


def test_a_gradient_is_there_next_to_its_cast_to_a_narrower_type() -> None:
    tape = tape_in()
    narrow, wide = tape.new(COUNT, 2, grad=True), tape.new(COUNT, 4, grad=True)
    product = tape.product(narrow, wide)
    tape.drop(narrow, wide)
    product.gradient = tape.new(COUNT, 4)
    tape.drop(product)
    tape.begin_segment("backward", "temporary")
    tape.backward()
    # both numbers, the product's gradient, theirs, and the first as wide as it was computed
    assert tape.peaks["backward"][0] == (2 + 4 + 4 + 2 + 4 + 4) * COUNT


def test_a_view_holds_the_whole_and_gradients_of_views_are_joined() -> None:
    tape = tape_in()
    whole = tape.new(COUNT, 2, grad=True)
    left, right = tape.split(whole, (COUNT // 4, 3 * COUNT // 4))
    tape.drop(whole, left)
    assert tape.total == 2 * COUNT
    used = tape.scale(right)
    tape.drop(right)
    assert tape.total == used.size
    used.gradient = tape.new(used.count, 2)
    tape.drop(used)
    tape.backward()
    assert whole.gradient is not None
    assert tape.total == 2 * COUNT


def test_work_that_no_loss_reaches_is_freed_without_gradients() -> None:
    tape = tape_in()
    x = tape.new(COUNT, 4, grad=True)
    y = tape.elementwise(x)
    tape.drop(x, y)
    tape.backward()
    assert tape.total == 0


def test_kernels_take_bytes_that_only_the_peak_knows() -> None:
    tape = tape_in()
    x = tape.new(COUNT, 4, grad=True)
    y = tape.kernel(x, COUNT, 4, scratch=1 << 20, back=1 << 21)
    assert tape.peaks["all"][1]["temporary"] == 1 << 20
    y.gradient = tape.new(COUNT, 4)
    tape.begin_segment("backward", "temporary")
    tape.backward()
    assert tape.peaks["backward"][0] >= 1 << 21
    assert tape.live["temporary"] == x.size


@pytest.mark.parametrize(("computed", "kept"), [(4, 4), (2, 4)])
def test_a_weights_gradient_stays_in_its_own_type(computed: int, kept: int) -> None:
    tape = tape_in()
    x = tape.new(COUNT, computed)
    w = Weight(COUNT, kept, trained=True, grad_width=kept)
    y = tape.linear(x, w, COUNT)
    tape.drop(x)
    y.gradient = tape.new(COUNT, computed)
    tape.drop(y)
    tape.backward()
    assert tape.live["gradients"] == tape.total == kept * COUNT


def test_a_tied_weight_has_one_gradient_and_an_earlier_one_is_added_to() -> None:
    peaks = []
    for first in (None, EARLIER):
        tape = tape_in()
        w = Weight(COUNT, 4, trained=True, grad_width=4)
        w.gradient = first
        for _ in range(2):
            y = tape.lookup(w, 1)
            y.gradient = tape.new(1, 4)
            tape.drop(y)
            tape.backward()
        assert tape.total == (0 if first is EARLIER else 4 * COUNT)
        peaks.append(tape.peaks["all"][0])
    assert peaks[0] > peaks[1]


@pytest.mark.parametrize(("computed", "tensors"), [(2, 2), (4, 3)])
def test_tied_gradients_add_in_place_unless_the_first_is_a_view(computed: int, tensors: int) -> None:
    """torch's profiler shows the same for an embedding that is also the head: add_ under autocast, which casts, and add
    without it.
    """
    tape, weight = tape_in(), Weight(COUNT, 4, trained=True, grad_width=4)
    read = tape.lookup(weight, 1)  # as an encoder does, last in the backward pass
    words = tape.cast(tape.lookup(weight, 1), computed)
    logits = tape.linear(words, weight, 1)
    logits.gradient, read.gradient = tape.new(1, 4), tape.new(1, 4)
    tape.drop(words, logits, read)
    tape.backward(1)
    assert tape.peaks["all"][0] // (4 * COUNT) == tensors
    tape.begin_segment("encoder", "temporary")
    tape.backward()
    assert tape.peaks["encoder"][0] // (4 * COUNT) == 2, "the sum of two is not a view"


def test_each_segment_has_its_own_peak_also_when_entered_again() -> None:
    tape = tape_in("one")
    tape.drop(tape.new(COUNT, 4))
    tape.begin_segment("two", "temporary")
    tape.drop(tape.new(COUNT, 2))
    tape.begin_segment("one", "activations")
    tape.drop(tape.new(COUNT, 1))
    assert {name: peak for name, (peak, _) in tape.peaks.items()} == {"one": 4 * COUNT, "two": 2 * COUNT}
    tape.repeat({"weights": 10}, 3)
    assert tape.live["weights"] == 30
    assert tape.peaks["one"][0] == 4 * COUNT


def test_a_layer_is_computed_again_only_up_to_what_was_saved_last() -> None:
    """Non-reentrant checkpointing stops there; what comes after has no bytes, but still its place in the graph."""
    tape = Tape()
    tape.begin_segment("all", "activations")
    x = tape.new(1024, 4, grad=True)
    weight = Weight(1024, 4, trained=True, grad_width=4)
    tape.stop = 2
    made = tape.elementwise(x)
    product = tape.linear(made, weight, 1024)
    last = tape.kernel(product, 1024, 4, scratch=4096, back=0)
    assert tape.last_saving == 2
    assert tape.total == 2 * 4096
    last.gradient = tape.new(1024, 4)
    tape.drop(made, product, last)
    tape.backward()
    assert x.gradient is not None
    assert weight.gradient is not None


@pytest.mark.parametrize("raises", [False, True])
def test_a_scope_drops_what_it_holds_when_its_block_ends(raises: bool) -> None:
    tape = tape_in()
    with contextlib.suppress(ValueError), tape.scope(tape.new(COUNT, 4)) as variables:
        variables.hold(tape.new(COUNT, 4))
        assert tape.total == 2 * 4 * COUNT
        if raises:
            raise ValueError
    assert tape.total == 0


FROZEN = Weight(COUNT, 4, trained=False, grad_width=4)
OPERATIONS: dict[str, tuple[Callable[[Tape, Tensor, Tensor], Tensor], int]] = {
    "scale": (lambda tape, x, y: tape.scale(x), 0),
    "cast": (lambda tape, x, y: tape.cast(x, 2), 0),
    "resize": (lambda tape, x, y: tape.resize(x, 2 * COUNT), 0),
    "kernel": (lambda tape, x, y: tape.kernel(x, COUNT, 4, scratch=512, back=512), 0),
    "add": (lambda tape, x, y: tape.add(x, y), 0),
    "elementwise": (lambda tape, x, y: tape.elementwise(x), 4 * COUNT),
    "elementwise_by_result": (lambda tape, x, y: tape.elementwise_by_result(x), 4 * COUNT),
    "root_mean": (lambda tape, x, y: tape.root_mean(x, COUNT // 4), COUNT),
    "dropout": (lambda tape, x, y: tape.dropout(x, 1), COUNT),
    "product": (lambda tape, x, y: tape.product(x, y), 2 * 4 * COUNT),
    "bilinear": (lambda tape, x, y: tape.bilinear(x, y, COUNT), 2 * 4 * COUNT),
    "route": (lambda tape, x, y: tape.route(x, COUNT, trained=True), 2 * 4 * COUNT),
    "layer_norm": (lambda tape, x, y: tape.layer_norm(x, FROZEN, COUNT), 4 * COUNT + 2 * 4 * COUNT),
    "frozen linear": (lambda tape, x, y: tape.linear(x, FROZEN, COUNT), 0),
    "fused_attention": (lambda tape, x, y: tape.fused_attention([x, y, y], [], COUNT, 0), 4 * 4 * COUNT),
}
"""Operations of two float32 tensors, and the bytes that each keeps once no variable holds its inputs and result."""


@pytest.mark.parametrize("kind", sorted(OPERATIONS))
def test_each_kind_of_operation_frees_what_it_saved(kind: str) -> None:
    tape = tape_in()
    operation, saved = OPERATIONS[kind]
    x, y = tape.new(COUNT, 4, grad=True), tape.new(COUNT, 4, grad=True)
    result = operation(tape, x, y)
    result.gradient = tape.new(result.count, result.width)
    gradient = result.gradient.size
    tape.drop(x, y, result)
    assert tape.total == saved + gradient
    tape.backward()
    assert tape.total == sum(t.gradient.size for t in (x, y) if t.gradient is not None) - (kind == "add") * 4 * COUNT

"""FSDP 2: buffers that are gathered, sent and freed in a simulated step, compared with traces of torch."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from broker.domain.workload import ModelShape, Plan
from broker.estimator.memory.device_overhead import CUBLAS_WORKSPACE
from broker.estimator.memory.estimate import EstimateOptions, estimate, numerics
from broker.estimator.memory.simulator.classifier import ClassifierSimulator
from broker.estimator.memory.simulator.decoder import DecoderSimulator
from broker.estimator.memory.simulator.fsdp import Sharded, Unit, root_parameters, units
from broker.estimator.memory.simulator.tape import Tape
from broker.estimator.memory.simulator.types import Step
from broker.estimator.planning.plan_search import Planner
from broker.estimator.speed.hardware import TABLE
from tests.support.machines import LLAMA_3_8B, SMOLLM2_135M, WORK

FULL: dict[str, Any] = {"method": "full", "checkpointing": True}


def peak(shape: ModelShape, **ask: Any) -> int:
    return estimate(shape, EstimateOptions(sharding="fsdp", **ask)).peak_allocated - CUBLAS_WORKSPACE


@pytest.mark.parametrize(
    ("shape", "ask", "traced"),
    [
        (LLAMA_3_8B, {**FULL, "gpus": 8}, 21_839_398_912),
        (LLAMA_3_8B, {**FULL, "gpus": 2, "length": 512, "accumulated": True}, 71_596_978_176),
        (LLAMA_3_8B, {**FULL, "gpus": 8, "length": 512, "precision": "bf16"}, 12_618_804_224),
        (LLAMA_3_8B, {"method": "full", "gpus": 4, "length": 64, "precision": "fp32"}, 40_461_240_320),
        (LLAMA_3_8B, {"gpus": 4, "length": 64, "checkpointing": True}, 9_222_149_120),
        (LLAMA_3_8B, {"gpus": 2, "length": 64, "accumulated": True}, 13_446_994_944),
        (LLAMA_3_8B, {"gpus": 8}, 24_099_818_496),
        (SMOLLM2_135M, {"method": "full", "gpus": 2, "length": 64}, 1_260_371_456),
        (SMOLLM2_135M, {**FULL, "gpus": 8, "length": 64, "accumulated": True}, 509_882_368),
        (SMOLLM2_135M, {**FULL, "gpus": 4, "length": 64, "precision": "fp32"}, 977_133_568),
        (SMOLLM2_135M, {"gpus": 4, "length": 256, "precision": "bf16", "targets": ("q_proj", "v_proj")}, 452_219_904),
        (SMOLLM2_135M, {"gpus": 2, "length": 64}, 319_686_656),
    ],
)
def test_the_peak_is_that_of_the_first_of_several_traced_devices(
    shape: ModelShape, ask: dict[str, Any], traced: int
) -> None:
    """The expected figures are from `python -m trainer.memtrace --sharding fsdp`."""
    assert peak(shape, **ask) == pytest.approx(traced, rel=0.004)


def test_every_gather_and_reduction_lives_as_long_as_in_torch() -> None:
    tape = Tape()
    root = Unit(gathered=1000, cast=100, reduced=2000, named=300)
    world = Sharded(tape, root, Unit(gathered=64, cast=16, reduced=128), 4, keeps=True)

    def worst(*steps: Callable[[], None]) -> int:
        tape.begin_segment(str(len(tape.peaks)), "temporary")
        for step in steps:
            step()
        return tape.peaks[tape._segment][0]

    def made(size: int) -> Callable[[], None]:
        return lambda: tape.adjust("communication", size)

    ahead, last = partial(world.gather_back, ahead=True), partial(world.gather_back, ahead=False)
    assert worst(world.gather_root) == 2000  # received in one, copied out to another
    assert worst(world.gather) == 2000 + 2 * 64  # the root's is let go after that
    assert worst(world.free_layer, world.gather) == 1000 + 3 * 64  # the first one's still as it was received
    world.free_layer()
    world.free_root()
    assert tape.total == 1000
    assert worst(world.gather_last_layer) == 1000 + 64 + 16  # of its own share a copy in the other type
    assert worst(made(500)) == 1000 + 64 + 500
    assert worst(ahead) == 1500 + 2 * 64 + 16  # copied out, and the next one's received
    assert worst(made(64), world.reduce) == 1500 + 64 + 64 + 128  # its weights are let go first
    assert tape.live["gradients"] == 128 // 4
    assert worst(last) == 1500 + 2 * 64 + 128 + 32
    assert worst(made(64), world.reduce) == 1500 + 64 + 64 + 128 + 32  # what was sent before, or is now: never both
    assert worst(made(500), world.reduce_root) == 1000 + 2000 + 64  # whole gradients, and what they are sent from
    assert (tape.live["communication"], tape.live["gradients"]) == (0, 64 + 500)


def test_fsdp_copies_what_is_gathered_in_another_type_or_from_the_host() -> None:
    """FSDP casts a shard, or copies a shard from the host, before it gathers the shard."""
    options = EstimateOptions(method="full", sharding="fsdp", gpus=4)
    mixed, single = (numerics(SMOLLM2_135M, replace(options, precision=p))[0] for p in ("bf16-autocast", "fp32"))
    whole = SMOLLM2_135M.parameters
    for how, offload, cast in ((mixed, False, 2 * whole // 4), (single, False, 0), (single, True, 4 * whole // 4)):
        root, layer = units(SMOLLM2_135M, how, whole, 4, offload=offload)
        assert root.cast + 30 * layer.cast == pytest.approx(cast, rel=0.001)
        assert root.gathered + 30 * layer.gathered == pytest.approx(how.weight * whole, rel=0.001)


@pytest.mark.parametrize("layers", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "ask",
    [
        {"method": "full"},
        {"method": "full", "accumulated": True, "precision": "bf16"},
        {"checkpointing": True},
        {"targets": ("q_proj",)},
        {"targets": ("embed_tokens", "q_proj")},
        {"method": "full", "offload": True},
    ],
)
@pytest.mark.parametrize("labels", [0, 2])
def test_gathered_and_reduced_buffers_are_freed(labels: int, ask: dict[str, Any], layers: int) -> None:
    head: dict[str, Any] = {"labels": labels, "head": "words", "head_parameters": labels * 576} if labels else {}
    parameters = root_parameters(replace(SMOLLM2_135M, **head)) + layers * 3_540_096
    shape = replace(SMOLLM2_135M, layers=layers, parameters=parameters, **head)
    options = EstimateOptions(sharding="fsdp", gpus=2, length=8, **ask)
    how, _ = numerics(shape, options)
    step = Step(
        numerics=how, rows=1, length=8, checkpointing=options.checkpointing, accumulated=options.accumulated, shards=2,
        offload=options.offload,
    )  # fmt: skip
    simulator = (ClassifierSimulator if labels else DecoderSimulator)(shape, step)
    found = simulator.run()
    by = found.segments["optimizer"]
    assert simulator.tape.live["communication"] == by["communication"] == 0
    assert by["gradients"] == step.share(how.trained * simulator.trained)
    assert min(size for segment in found.segments.values() for size in segment.values()) >= 0


def test_gradients_that_machines_sum_are_named_to_the_end_of_the_pass() -> None:
    """torch keeps both the gradients that hybrid sharding reduces between machines and the sums they are added to."""
    options = EstimateOptions(
        method="full", precision="fp32", sharding="hybrid", gpus=4, nodes=2, length=64, checkpointing=True
    )
    once, again = (estimate(LLAMA_3_8B, replace(options, accumulated=a)).peak_allocated for a in (False, True))
    within = replace(options, sharding="fsdp", gpus=2, nodes=1)
    alone, added = (estimate(LLAMA_3_8B, replace(within, accumulated=a)).peak_allocated for a in (False, True))
    share = 4 * (LLAMA_3_8B.parameters - root_parameters(LLAMA_3_8B)) // 2
    assert once == alone
    assert again - added == pytest.approx(share, rel=0.1)


@pytest.mark.parametrize(("positions", "rows"), [(1024, 1024), (None, 0)])
def test_learned_positions_without_a_table_belong_to_the_root(positions: int | None, rows: int) -> None:
    """GPT-2 has learned positions, and its configuration lists no table of rows that are looked up."""
    shape = replace(SMOLLM2_135M, family="gpt2", max_positions=positions)
    assert not shape.looked_up
    hidden = shape.hidden
    assert root_parameters(shape) == (shape.vocabulary + rows) * hidden + 2 * hidden  # a LayerNorm has two vectors


def test_shares_in_the_hosts_memory_leave_what_is_gathered() -> None:
    off = peak(LLAMA_3_8B, **FULL, gpus=8, length=64, offload=True)
    root, layer = 2 * root_parameters(LLAMA_3_8B), 2 * 218_112_000
    assert 2 * root + layer < off < 5 * root


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(("way", "nodes"), [("fsdp", 1), ("hybrid", 2)])
def test_a_plan_needs_the_memory_that_its_estimate_states(way: Any, nodes: int, method: Any, precision: Any) -> None:
    work = replace(WORK, method=method, precision=precision)
    plan = Plan(parallelism=way, devices=4, micro_batch=1, accumulation=2, gradient_checkpointing=True)
    need = Planner(work).need(plan, TABLE["h100-sxm"], nodes)
    words = {"bf16": "bf16-autocast"}.get(precision, precision)
    more = {"gpus": 4, "nodes": nodes, "checkpointing": True, "accumulated": True}
    said = estimate(LLAMA_3_8B, EstimateOptions(method=method, precision=words, sharding=way, **more))  # type: ignore[arg-type]
    parts = need.weights + need.gradients + need.optimizer + need.activations + need.logits
    assert parts == said.peak_allocated - CUBLAS_WORKSPACE

"""Bytes that the simulator keeps for each activation function of transformers, compared with the tracer."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
from accelerate.state import AcceleratorState
from transformers.activations import ACT2FN

from benchmarks.memory_forms import cases, compared
from broker.estimator.memory.device_overhead import CUBLAS_WORKSPACE
from broker.estimator.memory.simulator.layers.activations import WRITTEN
from broker.model_catalog.config_validation import ACTIVATIONS
from broker.sizing.estimate import estimate

ASK = next(ask for _, ask in cases(1)) | {"method": "lora", "seq": 256, "micro_batch": 4, "lora_targets": "all-linear"}
SIZES: dict[str, Any] = {
    "num_hidden_layers": 5, "hidden_size": 128, "intermediate_size": 2048, "num_attention_heads": 4,
    "vocab_size": 512, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Reset accelerate's state, which is global to the process and includes the precision."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def test_every_activation_of_transformers_is_known() -> None:
    assert set(ACT2FN) == ACTIVATIONS


@pytest.mark.parametrize(
    ("family", "precision", "kind"),
    [("starcoder2", "fp32", kind) for kind in sorted(ACTIVATIONS)]
    + [("llama", "bf16-autocast", kind) for kind in ("relu", *sorted(WRITTEN))],
)
def test_bytes_kept_for_each_activation_equal_the_tracers(family: str, precision: str, kind: str) -> None:
    ask = {**ASK, "method": "full", "precision": precision, "gradient_checkpointing": False}
    config = {"model_type": family, **SIZES, "hidden_act": kind}
    written_out = kind == "mish"  # the meta device runs several operations, a GPU one kernel as for silu
    traced = compared(config | ({"hidden_act": "silu"} if written_out else {}), ask)[0]
    estimated = estimate(config=config, **ask)["peak_allocated_bytes"] - CUBLAS_WORKSPACE
    assert estimated == pytest.approx(traced, rel=0.03 if kind == "xielu" else 0.02)

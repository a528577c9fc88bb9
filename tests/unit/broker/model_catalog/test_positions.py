"""Longest sequence of a model, by its config's positions and their scaling."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from broker.cli.main import app
from broker.model_catalog.parameter_count import positions

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256,
    "num_attention_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


@pytest.mark.parametrize(
    ("more", "tokens"),
    [
        ({}, 4096),
        ({"max_position_embeddings": None}, None),
        ({"rope_scaling": None}, 4096),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 16_384),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, 8192),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, 8192),
        ({"rope_scaling": YARN, "max_position_embeddings": 32_768}, 131_072),
        ({"rope_scaling": {**YARN, "factor": 2.0}, "max_position_embeddings": 131_072}, 131_072),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "max_position_embeddings": 131_072}, 131_072),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}, "model_type": "gemma3_text"}, 4096),
    ],
)
def test_positions_are_stretched_as_transformers_reads_them(more: dict[str, Any], tokens: int | None) -> None:
    assert positions(LLAMA | more) == tokens


def estimated(seq: int, **more: Any) -> tuple[int, str]:
    argv = ["estimate", "--config", json.dumps(LLAMA | more), "--seq", str(seq)]
    ran = CliRunner().invoke(app, argv)
    return ran.exit_code, ran.stderr


def test_sequence_within_scaled_positions_is_estimated_a_longer_is_not() -> None:
    """A sequence within what was stretched is estimated and a longer one is not."""
    scaled = {"rope_scaling": {"type": "linear", "factor": 4.0}}
    assert estimated(16_384)[0] == 2
    assert estimated(16_384, **scaled)[0] == 0
    code, said = estimated(16_385, **scaled)
    assert code == 2
    assert "16384" in said.replace(",", "")


@pytest.mark.parametrize("factor", [0, -2, "4", True, 1e300, [4], None, float("nan")])
def test_an_invalid_scaling_factor_is_refused_in_one_line(factor: Any) -> None:
    code, said = estimated(64, rope_scaling={"type": "linear", "factor": factor})
    assert code == 2
    assert "factor" in said
    assert said.count("\n") == 1

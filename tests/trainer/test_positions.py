"""How far a model's positions reach."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.test_preflight import PLAIN, spec, told


@pytest.mark.parametrize(
    ("rope", "reach"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, 64),
        ({"rope_type": "linear", "factor": 2.0}, 32),
        ({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}, 16),
        ({"rope_type": "default"}, 16),
    ],
)
def test_scaled_positions_reach_as_far_as_they_are_scaled(
    rope: dict[str, Any], reach: int, tiny_models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(tiny_models["lora"], tmp_path / "model")
    config = {"model_type": "llama", "max_position_embeddings": 16, "rope_theta": 10_000.0, "rope_scaling": rope}
    (folder / "config.json").write_text(json.dumps(config))
    train: dict[str, Any] = {"model": str(folder), "method": {"kind": "full"}, "data": PLAIN, "packing": True}
    text = "word,meaning\nw1,w2\nw3,w4\n"
    assert told(spec(tmp_path, text, **train, max_length=reach), capsys)[0] == 0
    code, _, err = told(spec(tmp_path, text, **train, max_length=reach + 1), capsys)
    assert (code, f"has {reach} positions" in err) == (64, True)

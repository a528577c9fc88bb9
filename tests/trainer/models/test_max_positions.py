"""The highest position that a model supports."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertForMaskedLM

from tests.trainer.standalone.test_preflight import PLAIN, spec, told
from tests.trainer.support import tiny_models as heads
from tests.trainer.support import workers
from trainer.contract.documents import ExitCode
from trainer.contract.train import TrainConfig


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


@pytest.mark.parametrize("words", [16, 40])
def test_a_training_of_rows_that_reach_further_is_refused_before_it_begins(words: int, tmp_path: Path) -> None:
    """The worker would otherwise fail at the first long row and blame the machine."""
    folder, data = tmp_path / "model", tmp_path / "rows.csv"
    BertForMaskedLM(BertConfig(**heads.BERT | {"max_position_embeddings": 16})).save_pretrained(folder)
    heads.tokenizer().save_pretrained(folder)
    data.write_text("meaning,kind\n" + "w1 w2,a\nw3,b\n" * 6 + f"{'w4 ' * words},a\n")
    train = TrainConfig.model_validate({
        "model": str(folder), "task": "text_classification", "max_length": 64, "max_steps": 1, "global_batch": 2,
        "data": {"path": "rows.csv", "prompt": "{meaning}", "label": "kind"},
    })  # fmt: skip
    ended = workers.Worker(tmp_path / "run", train, data).start().end()
    refused = words > 16
    assert ended.code == (ExitCode.USER_ERROR if refused else ExitCode.COMPLETED), ended.message
    assert ended.message.startswith("train.max_length: rows reach 40 tokens") is refused

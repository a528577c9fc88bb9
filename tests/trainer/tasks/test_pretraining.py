"""The examples of pre-training, with a tiny model and texts in its words."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from examples import fresh_model
from tests.trainer.support import tiny_models as heads
from tests.trainer.support import workers
from trainer.contract.train import FullConfig, TrainConfig

TASKS = Path(fresh_model.__file__).parent / "tasks"
LAYERS = 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return models by example: an existing one to continue, and a fresh one of the same shape except for one layer."""
    folder = tmp_path_factory.mktemp("models")
    made = {"continue": heads.llama(folder / "made"), "pretrain": folder / "fresh"}
    fresh_model.main([str(made["continue"]), "--out", str(made["pretrain"]), "--set", f"num_hidden_layers={LAYERS}"])
    return made


@pytest.mark.parametrize("name", ["continue", "pretrain"])
def test_an_example_learns_from_plain_texts(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    texts = [" ".join(f"w{(i + j) % 20}" for j in range(8 + i % 9)) for i in range(64)]
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    written: dict[str, Any] = yaml.safe_load((TASKS / f"{name}.yaml").read_text())["train"]
    small = {"model": str(models[name]), "max_length": 64, "max_steps": 8, "samples": {}}
    train = TrainConfig.model_validate(written | small | {"optim": {**written["optim"], "lr": 1e-2}})
    assert train.packing
    assert isinstance(train.method, FullConfig)
    rows, _ = workers.story(workers.finished(tmp_path / "run", train, data))
    losses = [loss for _, loss, _, _ in rows]
    assert losses[0] == pytest.approx(math.log(heads.WORDS), rel=0.1), "every word is as likely as any other"
    assert losses[-1] < 0.9 * losses[0]
    tokens = [json.loads(line)["tokens"] for line in (tmp_path / "run").rglob("metrics.jsonl").__next__().open()]
    assert all(16 * 9 <= count <= 16 * 17 for count in tokens), "each row whole, with its end"


def test_fresh_model_has_the_requested_shape_and_replaces_nothing(
    models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """An existing folder is never overwritten."""
    config = json.loads((models["pretrain"] / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (LAYERS, 32)
    made, fresh = (load_file(models[name] / "model.safetensors") for name in ("continue", "pretrain"))
    assert not made["model.embed_tokens.weight"].equal(fresh["model.embed_tokens.weight"]), "nothing is taken over"
    before = (models["pretrain"] / "model.safetensors").read_bytes()
    with pytest.raises(SystemExit):
        fresh_model.main([str(models["continue"]), "--out", str(models["pretrain"])])
    assert "already exists" in capsys.readouterr().err
    assert (models["pretrain"] / "model.safetensors").read_bytes() == before
    other = models["pretrain"].parent / "other"
    with pytest.raises(SystemExit, match=r"--set nmu_layers: the config of .* has no such key"):
        fresh_model.main([str(models["continue"]), "--out", str(other), "--set", "nmu_layers=1"])
    assert not other.exists()

"""A model whose files lack weights is not trained over random ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.support import tiny_jobs, workers
from tests.trainer.support import tiny_models as heads
from tests.trainer.support.tiny_jobs import KINDS
from trainer.contract.documents import ExitCode
from trainer.contract.train import TrainConfig
from trainer.core.errors import UserFault
from trainer.models import loading as models

DECODER, TEXT = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
MLP = "layers.1.mlp."


def config(folder: Path, **more: Any) -> TrainConfig:
    return TrainConfig.model_validate({"model": str(folder), "data": {"path": "x.csv", "completion": "{a}"}, **more})


def changed(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> Path:
    """Return the model with some of its weights gone (None), or others in their place."""
    file = folder / "model.safetensors"
    found = {name: change(name, tensor) for name, tensor in load_file(file).items()}
    save_file({name: t for name, t in found.items() if t is not None}, file, metadata={"format": "pt"})
    return folder


def without(folder: Path, *parts: str) -> Path:
    return changed(folder, lambda name, tensor: None if any(part in name for part in parts) else tensor)


@pytest.mark.parametrize(
    ("method", "hollow"),
    [(tiny_jobs.LORA, False), (tiny_jobs.FULL, False), (tiny_jobs.FULL, True), (tiny_jobs.NF4, False)],
    ids=["lora", "full", "hollow", "qlora"],
)
def test_missing_weights_are_named(method: Any, hollow: bool, tmp_path: Path) -> None:
    folder = without(heads.llama(tmp_path), "lm_head", MLP)
    with pytest.raises(UserFault, match=r"lack 4 of its weights.* \(lm_head.weight, model.layers.1.mlp.down_proj"):
        models.load(config(folder, method=method), "fp32", DECODER, hollow=hollow)


def test_weights_of_another_shape_are_reported_as_missing(tmp_path: Path) -> None:
    folder = changed(heads.llama(tmp_path), lambda name, tensor: tensor[:-1] if MLP in name else tensor)
    with pytest.raises(UserFault, match="lack 3 of its weights, or have them in another shape"):
        models.load(config(folder), "fp32", DECODER)


@pytest.mark.parametrize("make", [heads.llama, heads.bert, heads.roberta, heads.bart, heads.t5])
def test_a_head_may_be_new_and_nothing_below_it(make: Callable[[Path], Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_labels": 3, "ignore_mismatched_sizes": True}
    _, fresh = models.load(config(make(tmp_path)), "fp32", TEXT, **options)
    assert fresh, "its head"
    below = "layers.0.fc1" if make is heads.bart else "wi.weight" if make is heads.t5 else ".0."
    with pytest.raises(UserFault, match="of its weights"):
        models.load(config(without(tmp_path, below)), "fp32", TEXT, **options)


def test_a_tied_head_is_not_a_missing_weight(tmp_path: Path) -> None:
    folder = heads.causal("gemma", tmp_path)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert models.load(config(folder), "fp32", DECODER)[1] == []


def test_the_trainer_ends_by_the_user_s_fault(tmp_path: Path) -> None:
    kind, data = KINDS["causal_lm lora"], tmp_path / "rows.csv"
    data.write_bytes(tiny_jobs.data(kind))
    train = tiny_jobs.train(kind, tmp_path / "model")
    without(Path(train.model), MLP)
    ended = workers.Worker(tmp_path / "run", train, data).start().end()
    assert (ended.code, "lack 3 of its weights" in ended.message) == (ExitCode.USER_ERROR, True), ended.message

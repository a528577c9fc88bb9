"""Language models of each supported family learn, and resume after a kill bit for bit."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.support import tiny_jobs, workers
from tests.trainer.support import tiny_models as heads
from tests.trainer.support.crews import tensors
from trainer.contract.documents import ExitCode
from trainer.contract.train import FullConfig, LoraConfig, TrainConfig

METHODS: dict[str, Any] = {"full": FullConfig(), "lora": LoraConfig(r=4, dropout=0.2)}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", heads.FAMILIES)
def test_a_family_learns_and_is_resumed_bit_by_bit(family: str, method: str, tmp_path: Path) -> None:
    data = tmp_path / "rows.csv"
    data.write_bytes(tiny_jobs.data(tiny_jobs.KINDS["causal_lm lora"]))
    train = TrainConfig.model_validate({
        "model": str(heads.causal(family, tmp_path / "model")), "method": METHODS[method], "optim": {"lr": 1e-2},
        "data": {"path": "rows.csv", **tiny_jobs.COMPLETION_COLUMNS, "eval_share": 0.0}, "max_steps": 5,
        "global_batch": 12, "micro_batch": 6, "max_length": 32,
    })  # fmt: skip
    whole = workers.finished(tmp_path / "whole", train, data)
    killed = workers.Worker(tmp_path / "killed", train, data).killed()
    last = workers.Worker(tmp_path / "last", train, data, restore=killed)
    assert last.start().end().code == ExitCode.COMPLETED
    found = workers.story(last.last)
    assert found == workers.story(whole)
    assert [step for step, *_ in found[0]] == [1, 2, 3, 4, 5]
    assert found[0][-1][1] < found[0][0][1], "it learns"
    adapted = [name for name in tensors(last.last) if "lora_" in name]
    assert bool(adapted) is (method == "lora")
    assert not any("experts" in name for name in adapted), "they are not linear modules, and the estimate knows"

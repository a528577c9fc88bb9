"""Encoder-decoders: inputs and targets, loss, ROUGE and bitwise resume."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.support import tiny_models as heads
from tests.trainer.support import workers
from trainer.contract.train import FullConfig, LoraConfig, OptimConfig, SamplesConfig, TrainConfig
from trainer.tasks.common.label_metrics import rouge_l
from trainer.tasks.text.seq2seq import Seq2Seq

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {"t5": heads.t5(folder / "t5"), "bart": heads.bart(folder / "bart")}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return rows whose summary is their first word."""
    lines = ["article,summary"]
    lines += [f"{' '.join(f'w{(i + j * j) % 12}' for j in range(2 + i % 4))},w{i % 12}" for i in range(48)]
    path = tmp_path / "articles.csv"
    path.write_text("\n".join(lines))
    return path


def config(folder: Path, **changes: Any) -> TrainConfig:
    fields: dict[str, Any] = {
        "task": "seq2seq", "model": str(folder), "method": LoraConfig(r=8, dropout=0.1), "max_steps": 20,
        "data": {"path": "articles.csv", "prompt": "{article}", "completion": "{summary}", "eval_share": 0.2},
        "optim": OptimConfig(lr=1e-2), "global_batch": 12, "micro_batch": 3, "max_length": 16,
        "samples": SamplesConfig(prompts=("w3 w7",), max_new_tokens=4),
    }  # fmt: skip
    return TrainConfig.model_validate(fields | changes)


@pytest.mark.parametrize(("model", "method"), [("t5", FullConfig()), ("bart", LoraConfig(r=8, dropout=0.1))])
def test_resume_bitwise_of_summaries(
    model: str, method: Any, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    train = config(models[model], method=method)
    calm = workers.finished(tmp_path / "calm", train, data)
    rough = workers.resumed(tmp_path / "rough", train, data)
    assert workers.story(rough) == workers.story(calm)
    scores = json.loads((calm / "eval.json").read_text())
    assert scores == json.loads((rough / "eval.json").read_text())
    assert scores["heldout_loss_after"] < scores["heldout_loss_before"]
    assert 0 <= scores["metrics_after"]["rouge_l"] <= 1
    assert (calm / ("adapter" if method.kind == "lora" else "model")).is_dir()


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_the_loss_equals_that_of_transformers(kind: str, models: dict[str, Path], data: Path) -> None:
    task = Seq2Seq(config(models[kind], method=FullConfig()))
    examples, dropped = task.examples(data, "csv")
    assert dropped == 0
    model = task.model.build("fp32").eval()
    batch = task.data.collate(examples[:5], CPU)
    theirs = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]
    ).loss.item()
    ours = task.model.loss_sum(model, batch).item() / sum(map(task.data.targets, examples[:5]))
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_targets_end_are_cut_and_empty_rows_are_dropped(models: dict[str, Path], data: Path) -> None:
    long = " ".join(f"w{n}" for n in range(30))
    data.write_text(f"article,summary\nw1 w2,w1\n{long},{long}\nw1,\n")
    task = Seq2Seq(config(models["t5"]))
    examples, dropped = task.examples(data, "csv")
    assert dropped == 1
    assert examples[0].labels == [4, 2]
    assert [len(examples[1].ids), len(examples[1].labels), examples[1].labels[-1]] == [16, 16, 2]
    assert task.data.targets(examples[0]) == 2


def test_rouge_is_the_share_of_words_in_order() -> None:
    assert rouge_l("The cat sat.", "the cat sat") == 1
    assert rouge_l("police killed the gunman", "police kill the gunman") == pytest.approx(0.75)
    assert rouge_l("a b c d", "d c b a") == pytest.approx(0.25)
    assert rouge_l("", "a") == rouge_l("a", "") == 0

"""Text classification and regression: training, metrics, saved head and bitwise resume."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.support import tiny_models as heads
from tests.trainer.support import workers
from trainer.contract.data_config import DataConfig
from trainer.contract.train import FullConfig, LoraConfig, OptimConfig, SamplesConfig, TrainConfig
from trainer.core.errors import DataFault
from trainer.tasks.common import label_metrics as labelled
from trainer.tasks.text.text_classification import TextClassification

Made = dict[str, Path]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("models")
    return {
        "bert": heads.bert(folder / "bert"),
        "roberta": heads.roberta(folder / "roberta"),
        "llama": heads.llama(folder / "llama"),
    }


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return rows whose score is the share of words below w10."""
    lines = ["text,mood,score"]
    for i in range(48):
        good = i % 4
        words = [f"w{5 + (i + j) % 5}" for j in range(good)] + [f"w{20 + (i * 7 + j) % 5}" for j in range(3 - good)]
        lines.append(f"{' '.join(words)},{'good' if good > 1 else 'bad'},{good / 3:.3f}")
    path = tmp_path / "texts.csv"
    path.write_text("\n".join(lines))
    return path


def config(folder: Path, label: str = "mood", **changes: Any) -> TrainConfig:
    task = {"mood": "text_classification", "score": "text_regression"}[label]
    fields: dict[str, Any] = {
        "task": task, "model": str(folder), "method": LoraConfig(r=4), "optim": OptimConfig(lr=1e-2), "max_steps": 24,
        "data": {"path": "texts.csv", "prompt": "{text}", "label": label, "eval_share": 0.25}, "global_batch": 12,
        "micro_batch": 3, "max_length": 32, "samples": SamplesConfig(prompts=("w5 w6 w7", "w20 w21 w22")),
    }  # fmt: skip
    return TrainConfig.model_validate(fields | changes)


@pytest.mark.parametrize(
    ("model", "label", "method"),
    [("bert", "mood", LoraConfig(r=4)), ("llama", "mood", FullConfig()), ("bert", "score", LoraConfig(r=4))],
    ids=["lora", "full", "regression"],
)
def test_resume_bitwise_of_texts(model: str, label: str, method: Any, models: Made, data: Path, tmp_path: Path) -> None:
    rate = 1e-2 if method.kind == "lora" else 3e-3
    train = config(models[model], label, method=method, optim=OptimConfig(lr=rate))
    calm = workers.finished(tmp_path / "calm", train, data)
    rough = workers.resumed(tmp_path / "rough", train, data)
    assert workers.story(rough) == workers.story(calm)
    scores = json.loads((calm / "eval.json").read_text())
    assert scores == json.loads((rough / "eval.json").read_text())
    assert scores["heldout_loss_after"] < 0.8 * scores["heldout_loss_before"]
    after, before = scores["metrics_after"], scores["metrics_before"]
    if label == "mood":
        assert after["accuracy"] > before["accuracy"]
        said = [s["tuned"].split()[0] for s in json.loads((calm / "samples.json").read_text())]
        assert said == ["good", "bad"]
    else:
        assert after["rmse"] < before["rmse"]
        assert after["mae"] < 0.3


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_saved_adapter_answers_as_trained(kind: str, models: Made, data: Path, tmp_path: Path) -> None:
    """Head and pooler start from random weights, so the adapter must contain them."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    done = workers.finished(tmp_path / "run", config(models[kind], precision="fp32"), data)
    torch.manual_seed(99)
    base = AutoModelForSequenceClassification.from_pretrained(models[kind], num_labels=2)
    model = PeftModel.from_pretrained(base, done / "adapter").eval()
    tokens = AutoTokenizer.from_pretrained(models[kind])("w5 w6 w7", return_tensors="pt")
    with torch.no_grad():
        share = model(input_ids=tokens["input_ids"]).logits.softmax(-1)[0]
    assert json.loads((done / "samples.json").read_text())[0]["tuned"] == f"good ({float(share[1]):.2f})"


def test_a_label_outside_of_the_set_is_named_by_file_and_row(models: Made, data: Path) -> None:
    task = TextClassification(
        config(
            models["bert"], data={"path": "texts.csv", "prompt": "{text}", "label": "mood", "labels": ["good", "so-so"]}
        )
    )
    with pytest.raises(DataFault, match=r"^texts\.csv row 1: label 'bad' is not among data\.labels \(good, so-so\)"):
        task.examples(data, "csv")


def test_one_label_alone_is_nothing_to_learn(models: Made, data: Path) -> None:
    data.write_text("text,mood\nw1,good\nw2,good\n")
    with pytest.raises(DataFault, match="column 'mood' has only the label 'good'"):
        TextClassification(config(models["bert"])).examples(data, "csv")


def test_scores_are_those_of_the_textbook() -> None:
    judged = [(0, 0), (0, 1), (1, 1), (1, 1), (2, 1)]
    assert labelled.accuracy(judged) == pytest.approx(3 / 5)
    assert labelled.macro_f1(judged) == pytest.approx((2 / 3 + 4 / 6 + 0) / 3)
    assert labelled.errors([(1.0, 2.0), (0.0, 3.0)]) == pytest.approx({"mae": 2.0, "rmse": 5**0.5})


def test_labels_of_the_spec_keep_the_order_of_a_trained_head(models: Made, data: Path, tmp_path: Path) -> None:
    """The first output would otherwise get the meaning of another one."""
    from transformers import AutoTokenizer, BertForSequenceClassification

    trained = BertForSequenceClassification.from_pretrained(
        models["bert"], id2label={0: "good", 1: "bad"}, label2id={"good": 0, "bad": 1}
    )
    trained.save_pretrained(tmp_path / "trained")
    AutoTokenizer.from_pretrained(models["bert"]).save_pretrained(tmp_path / "trained")
    described = {"path": "texts.csv", "prompt": "{text}", "label": "mood", "labels": ["bad", "good"]}
    task = TextClassification(config(tmp_path / "trained", data=described))
    task.examples(data, "csv")
    assert task.data.labels.names == ("good", "bad")
    assert ["order is not that of data.labels" in line for line in task.data.reader.notice_lines()] == [True]


def test_the_labels_of_the_data_are_the_heads_own(models: Made, data: Path) -> None:
    task = TextClassification(
        config(models["llama"], method=FullConfig(), data=DataConfig(path="t.csv", prompt="{text}", label="mood"))
    )
    task.examples(data, "csv")
    assert task.model.build("fp32").config.id2label == {0: "bad", 1: "good"}


def test_classes_that_replace_those_of_a_head_are_named(models: Made, data: Path, tmp_path: Path) -> None:
    """The first output of a head of POSITIVE and NEGATIVE would otherwise become `bad` without a word."""
    from transformers import AutoTokenizer, BertForSequenceClassification

    names = {"POSITIVE": 0, "NEGATIVE": 1}
    by_number = {number: name for name, number in names.items()}
    trained = BertForSequenceClassification.from_pretrained(models["bert"], id2label=by_number, label2id=names)
    trained.save_pretrained(tmp_path / "trained")
    AutoTokenizer.from_pretrained(models["bert"]).save_pretrained(tmp_path / "trained")
    described = {"path": "texts.csv", "prompt": "{text}", "label": "mood"}
    for labels in ([], ["bad", "good"]):
        task = TextClassification(config(tmp_path / "trained", data={**described, "labels": labels}))
        task.examples(data, "csv")
        words = "has the classes POSITIVE, NEGATIVE; its outputs are trained as bad, good in this order"
        assert [words in line for line in task.data.reader.notice_lines()] == [True]
    renamed = {"path": "texts.csv", "prompt": "{text}", "label": "mood", "labels": ["good", "bad", "so"]}
    task = TextClassification(config(tmp_path / "trained", data=renamed))
    task.examples(data, "csv")
    assert not task.data.reader.notice_lines(), "another number of classes has a new head"


@pytest.mark.parametrize(("cells", "is_noticed"), [("-1,0,1", True), ("-1,1,1", False), ("0,1,2", False)])
def test_a_label_that_often_means_none_is_noticed(cells: str, is_noticed: bool, models: Made, tmp_path: Path) -> None:
    """SNLI has -1 in rows without a label; it would be class 0."""
    rows = "".join(f"w{n} w2,{cell}\n" for n, cell in enumerate(cells.split(","), 3))
    (tmp_path / "t.csv").write_text("text,mood\n" + rows)
    task = TextClassification(config(models["bert"], global_batch=1, micro_batch=1))
    task.examples(tmp_path / "t.csv", "csv")
    notices = "".join(task.data.reader.notice_lines())
    assert ("the label -1 of column 'mood' is learned as a class; drop its rows" in notices) is is_noticed

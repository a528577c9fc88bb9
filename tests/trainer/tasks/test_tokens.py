"""Token classification: loss on the first token of a word, scores of whole spans, and bitwise resume."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.support import tiny_models as heads
from tests.trainer.support import workers
from trainer.batching.examples import IGNORED
from trainer.contract.train import LoraConfig, OptimConfig, SamplesConfig, TrainConfig
from trainer.core.errors import DataFault
from trainer.tasks.common import label_metrics
from trainer.tasks.text.token_classification import TokenClassification


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heads.bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return rows in which words below w10 are names, and w8 and w9 continue a name."""
    lines = []
    for i in range(40):
        words = [f"w{(i * 7 + j * 3) % 30}" for j in range(2 + i % 5)]
        numbers = [int(w[1:]) for w in words]
        tags = ["O" if n >= 10 else "B-NAME" if n < 8 else "I-NAME" for n in numbers]
        lines.append(json.dumps({"words": words, "tags": tags}))
    path = tmp_path / "names.jsonl"
    path.write_text("\n".join(lines))
    return path


def config(folder: Path, **changes: Any) -> TrainConfig:
    fields: dict[str, Any] = {
        "task": "token_classification", "model": str(folder), "method": LoraConfig(r=4, dropout=0.1),
        "data": {"path": "names.jsonl", "words": "words", "label": "tags", "eval_share": 0.25},
        "optim": OptimConfig(lr=1e-2), "max_steps": 20, "global_batch": 12, "micro_batch": 3, "max_length": 32,
        "samples": SamplesConfig(prompts=("w3 w20",)),
    }  # fmt: skip
    return TrainConfig.model_validate(fields | changes)


def test_resume_bitwise_of_tags(model: Path, data: Path, tmp_path: Path) -> None:
    train = config(model)
    calm = workers.finished(tmp_path / "calm", train, data)
    rough = workers.resumed(tmp_path / "rough", train, data)
    assert workers.story(rough) == workers.story(calm)
    scores = json.loads((calm / "eval.json").read_text())
    assert scores["heldout_loss_after"] < scores["heldout_loss_before"]
    assert scores["metrics_after"]["accuracy"] > scores["metrics_before"]["accuracy"]
    assert set(scores["metrics_after"]) == {"accuracy", "span_f1"}
    assert json.loads((calm / "samples.json").read_text())[0]["tuned"] == "w3/B-NAME w20/O"


def test_the_tag_lies_on_the_first_token_of_a_word(model: Path, data: Path) -> None:
    task = TokenClassification(config(model))
    examples, _ = task.examples(data, "jsonl")
    batch = task.data.collate(examples[:2], torch.device("cpu"))
    assert batch["labels"].tolist() == [[0, 0, -100], [0, 2, 2]]

    class Halves:
        """Tokenizer with two tokens a word, and one at either end."""

        def __call__(self, words: list[str], **_: Any) -> Any:
            of = [None, *(n for n in range(len(words)) for _ in range(2)), None]
            return type("Made", (dict,), {"word_ids": lambda self: of})(input_ids=[7] * len(of))

    task.data.tokenizer = Halves()
    assert task.data.tokenise(["a", "b"])[1] == [None, 0, None, 1, None, None]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"words": ["a", "b"], "tags": ["O"]}, "names.jsonl row 1: 2 words and 1 tags; give each word one"),
        ({"words": ["a"], "tags": ["X"]}, "names.jsonl row 1: label 'X' is not among data.labels (O, B-NAME)"),
        ({"words": 3, "tags": ["O"]}, "names.jsonl row 1: column 'words' is not a list of words"),
    ],
)
def test_a_bad_row_is_named(row: dict[str, Any], message: str, model: Path, data: Path) -> None:
    data.write_text(json.dumps(row))
    wanted = {"path": "names.jsonl", "words": "words", "label": "tags", "labels": ["O", "B-NAME"]}
    with pytest.raises(DataFault) as caught:
        TokenClassification(config(model, data=wanted)).examples(data, "jsonl")
    assert str(caught.value).startswith(message)


def test_scores_count_whole_spans() -> None:
    several = ["B-A", "I-A", "O", "B-A", "B-B", "I-A"]
    assert label_metrics.spans(several) == {("A", 0, 2), ("A", 3, 4), ("B", 4, 5), ("A", 5, 6)}
    spans, found = label_metrics.spans(["B-A", "I-A", "O", "B-B"]), label_metrics.spans(["B-A", "O", "O", "B-B"])
    assert label_metrics.span_f1([(spans, found)]) == 2 / 4
    assert label_metrics.span_f1([]) == 0


IOBES = [["S-PER", "O", "O", "S-LOC"], ["B-PER", "E-PER", "O", "B-LOC", "I-LOC", "E-LOC"]]


@pytest.mark.parametrize(
    ("predicted", "f1"),
    [
        (IOBES, 1.0),
        ([["O", "O", "O", "O"], IOBES[1]], 2 * 2 / (4 + 2)),
        ([IOBES[0], ["B-PER", "O", "O", "B-LOC", "I-LOC", "O"]], 2 * 2 / (4 + 2)),
        ([IOBES[0], ["B-PER", "E-LOC", "O", "I-LOC", "I-LOC", "E-LOC"]], 2 * 2 / (4 + 2)),
    ],
    ids=["all right", "single words missed", "ends missed", "kinds differ"],
)
@pytest.mark.parametrize("letters", ["BIES", "BILU", "BMES", "BMEW"])
def test_closed_spans_score_as_seqeval_strict_does(predicted: list[list[str]], f1: float, letters: str) -> None:
    """The values are seqeval's, mode strict, schemes IOBES and BILOU; a span without its end is none."""

    def renamed(tags: list[str]) -> list[str]:
        own = dict(zip("BIES", letters, strict=True))
        return [own.get(tag[0], tag[0]) + tag[1:] for tag in tags]

    names = {tag for tags in IOBES for tag in renamed(tags)}
    assert label_metrics.has_spans(names)
    assert label_metrics.is_closed(names)
    judged = [
        tuple(label_metrics.spans(renamed(tags), closed=True) for tags in both)
        for both in zip(IOBES, predicted, strict=True)
    ]
    assert label_metrics.span_f1(judged) == pytest.approx(f1)


def test_tags_of_whole_numbers_get_the_names_of_the_spec(model: Path, data: Path) -> None:
    data.write_text(json.dumps({"words": ["a", "b"], "tags": [0, 1]}))
    wanted = {"path": "names.jsonl", "words": "words", "label": "tags", "labels": ["O", "B-NAME"]}
    examples, _ = TokenClassification(config(model, data=wanted)).examples(data, "jsonl")
    assert [label for label in examples[0].labels if label != IGNORED] == [0, 1]


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        (["I-PER", "E-PER", "O", "E-LOC"], {("PER", 0, 2), ("LOC", 3, 4)}),
        (["I-PER", "I-PER", "E-PER", "E-PER", "O"], {("PER", 0, 3), ("PER", 3, 4)}),
        (["I-A", "E-A", "I-B", "I-B"], {("A", 0, 2), ("B", 2, 4)}),
        (["O", "O"], set()),
    ],
    ids=["IOE2", "two in a row", "IOE1 without its last end", "none"],
)
def test_spans_that_mark_their_end_only_are_found(tags: list[str], expected: set[label_metrics.Span]) -> None:
    """A tagger on IOE data would otherwise have the score 0 for perfect predictions."""
    names = {"O", "I-PER", "E-PER", "E-LOC"}
    assert label_metrics.has_spans(names)
    assert label_metrics.is_ended(names)
    assert label_metrics.spans(tags, closed=True, ended=True) == expected
    assert not label_metrics.is_ended({"O", "B-PER", "I-PER", "E-PER", "S-PER"})
    assert not label_metrics.is_ended({"O", "I-PER"})


def test_ends_alone_are_scored_in_the_metrics(model: Path, tmp_path: Path) -> None:
    (tmp_path / "names.jsonl").write_text(json.dumps({"words": ["a", "b", "c"], "tags": ["I-A", "E-A", "O"]}))
    task = TokenClassification(config(model))
    task.examples(tmp_path / "names.jsonl", "jsonl")
    numbers = tuple(task.data.labels.number(tag) for tag in ("I-A", "E-A", "O"))
    assert task.model.metrics([(numbers, numbers)]) == {"accuracy": 1.0, "span_f1": 1.0}

"""Cells that a template may not hold: the daemon's check, the preflight and the trainer refuse the same ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from broker.domain.errors import InvalidInput
from broker.preflight import dataset as daemon
from tests.trainer.support import tiny_models as heads
from trainer import preflight, tasks
from trainer.contract.data_config import DataConfig
from trainer.contract.train import TrainConfig
from trainer.core.errors import DataFault
from trainer.dataset import cells
from trainer.dataset.archives import Picture
from trainer.dataset.prompts import DataError, render


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heads.llama(tmp_path_factory.mktemp("models") / "llama")


def train(model: str = "a/b", **data: Any) -> TrainConfig:
    templates = {"path": "rows.jsonl", "prompt": "{q}", "completion": "{a}", **data}
    fields: dict[str, Any] = {"model": model, "data": templates, "global_batch": 1, "micro_batch": 1, "max_length": 16}
    return TrainConfig.model_validate(fields | ({"task": "dpo"} if "chosen" in data else {}))


@pytest.mark.parametrize("cell", ["[1]", '["w1"]', '{"w1": 2}', "true", "false", "NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("column", ["q", "a"])
def test_a_cell_without_text_makes_a_bad_row_that_names_its_column(
    cell: str, column: str, model: Path, tmp_path: Path
) -> None:
    good = '{"q": "w1", "a": "w2"}'
    bad = good.replace('"w1"' if column == "q" else '"w2"', cell)
    text = "\n".join((good, bad, good))
    said = f"column {column!r} is neither text, nor a finite number, nor a date; make it text or drop the row"
    with pytest.raises(InvalidInput) as refused:
        daemon.check(train(), daemon.summarise(text.encode(), "jsonl"))
    assert [problem.message for problem in refused.value.problems] == [f"row 2: {said}"]
    (tmp_path / "rows.jsonl").write_text(text)
    trained = tasks.build_task(train(str(model)))
    with pytest.raises(DataFault, match="neither text"):
        trained.examples(tmp_path / "rows.jsonl", "jsonl")
    assert trained.data.reader.faults == [f"rows.jsonl row 2: {said}"]
    (tmp_path / "train.json").write_text(train(str(model)).model_dump_json(exclude_defaults=True))
    report = preflight.check(tmp_path / "train.json")
    assert (report.code, report.bad) == (65, trained.data.reader.faults)


@pytest.mark.parametrize("cell", ["w1", "", 7, -2.5, "2026-01-31"])
def test_text_and_numbers_are_written_as_they_are(cell: Any) -> None:
    assert render(train().data, {"q": cell, "a": "w2"}, 1) == (str(cell), "w2")


@pytest.mark.parametrize("cell", [float("nan"), float("inf")])
def test_a_cell_without_plain_text_or_number_is_no_label(cell: float) -> None:
    assert cells.label(cell) is None
    data = {"path": "rows.json", "prompt": "{q}", "label": "l"}
    labelled = TrainConfig.model_validate(
        {"model": "a/b", "task": "text_classification", "data": data, "global_batch": 1, "micro_batch": 1}
    )
    rows = json.dumps([{"q": "w1", "l": "a"}, {"q": "w2", "l": cell}, {"q": "w3", "l": "b"}])
    with pytest.raises(InvalidInput, match="row 2: column 'l' is empty, or no plain text or number"):
        daemon.check(labelled, daemon.summarise(rows.encode(), "json"))


def test_a_picture_without_a_class_is_named() -> None:
    row = {"image": Picture(name="top.png", size=0, start=lambda count: b""), "label": None}
    with pytest.raises(DataError, match=r"^p.tar row 3 \(top.png\): no column 'label', or it is null"):
        cells.required("label", row, "label", "p.tar", 3)


def test_a_column_that_no_template_names_may_hold_anything() -> None:
    row = {"q": "w1", "a": "w2", "more": [True]}
    assert daemon.check(train(), daemon.summarise(json.dumps([row, row]).encode(), "json")).rows == 2


@pytest.mark.parametrize("cell", [1, 1.0, "1", "1.0", " 1 "])
def test_whole_numbers_are_one_class_in_every_notation(cell: Any) -> None:
    assert cells.label(cell) == "1"
    assert DataConfig(path="a.csv", labels=(cell, "two")).labels == ("1", "two")


@pytest.mark.parametrize(
    ("labels", "ordered"),
    [
        (["10", "9", "2"], ("2", "9", "10")),
        (["-1", "1", "0"], ("-1", "0", "1")),
        (["b", "10", "9"], ("10", "9", "b")),
        ([], ()),
    ],
)
def test_integer_classes_sort_as_numbers(labels: list[str], ordered: tuple[str, ...]) -> None:
    assert cells.sorted_labels(labels) == ordered


def test_numbers_are_indices_into_names_and_never_into_numbers() -> None:
    assert cells.known_labels(["0", "pos", "1"], ("neg", "pos"), "f", 1) == ["neg", "pos", "pos"]
    with pytest.raises(DataError, match=r"f row 4: label '0' is not among data\.labels"):
        cells.known_labels(["0"], ("1", "2"), "f", 4)
    with pytest.raises(DataError, match=r"label '2' is not among data\.labels"):
        cells.known_labels(["2"], ("neg", "pos"), "f", 4)


def test_tags_are_names_or_numbers() -> None:
    assert cells.tags([0, 1.0, "B-A"]) == ["0", "1", "B-A"]
    assert cells.tags("O B-A") == ["O", "B-A"]
    assert cells.tags('["O", "B-A", 1]') == ["O", "B-A", "1"]
    assert cells.words(' ["a b", "c"]') == ["a b", "c"]
    assert cells.words("[a] b") == ["[a]", "b"]
    assert cells.tags("[]") is cells.words("[1]") is None
    assert cells.tags([]) is cells.tags([None]) is cells.tags(3) is None

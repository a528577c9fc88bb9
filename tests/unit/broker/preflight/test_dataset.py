"""Findings in a data set before a cent is spent."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from broker.domain.errors import InvalidInput
from broker.preflight.dataset import DataSummary, check, rows_of, summarise
from tests.trainer.support.pack import tar
from trainer.contract.data_config import DataFormat
from trainer.contract.train import TrainConfig
from trainer.dataset.prompts import render
from trainer.dataset.readers import read_rows

DICTIONARY = Path(__file__).parents[4] / "examples" / "devils-dictionary.csv"


def train(prompt: str = "Define {word}:", completion: str = " {definition}", **changes: Any) -> TrainConfig:
    data = {"path": "a.csv", "prompt": prompt, "completion": completion, **changes.pop("data", {})}
    return TrainConfig.model_validate({"model": "a/b", "data": data, "global_batch": 1, "micro_batch": 1} | changes)


def rows(*found: dict[str, Any]) -> DataSummary:
    return summarise(json.dumps(found).encode(), "json")


def refusal(call: Any, *arguments: Any) -> tuple[str, str]:
    with pytest.raises(InvalidInput) as caught:
        call(*arguments)
    (problem,) = caught.value.problems
    assert "\n" not in problem.message
    return problem.field, problem.message


def test_the_demos_data_set() -> None:
    summary = summarise(DICTIONARY.read_bytes(), "csv")
    assert (summary.rows, list(summary.columns)) == (938, ["word", "part_of_speech", "definition"])
    report = check(train(global_batch=8), summary)
    assert (report.train_rows, report.heldout_rows) == (891, 47)
    assert 40 < report.tokens_mean < report.tokens_p99 < 512
    assert report.tokens_total == pytest.approx(report.tokens_mean * 938)
    assert report.truncated_share == 0
    assert report.example_prompt == "Define abasement:"
    assert report.example_completion.startswith(" A decent and customary mental attitude")


def test_a_summary_survives_its_storage() -> None:
    summary = summarise(DICTIONARY.read_bytes(), "csv")
    assert DataSummary.model_validate_json(summary.model_dump_json()) == summary


@pytest.mark.parametrize(
    ("data", "fmt", "words"),
    [
        (b"", "csv", "the file is empty"),
        (b"a,b\n", "csv", "no row"),
        (b"[]", "json", "no row"),
        (b"\xff\xfe", "csv", "save the file as UTF-8"),
        (b"a,b\n1,2,3\n", "csv", "line 2: more cells than the header's 2"),
        (b"{}", "json", "must be a list of objects"),
        (b'{"a": 1}\nnope\n', "jsonl", "line 2: not JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "jsonl", "line 1: not JSON"),
        (b'[{"a": ' + b"1" * 5000 + b"}]", "json", "line 1: not JSON"),
        (b'{"a": "\\ud800"}', "jsonl", "line 1: \\ud800"),
        (b'[{"a": 1}, {"\\uDFFF": 1}]', "json", "row 2: \\ud800"),
        (b"a,b,a\n1,2,3\n", "csv", "line 1: the header names 'a' twice"),
    ],
)
def test_an_unreadable_file_names_the_place(data: bytes, fmt: DataFormat, words: str) -> None:
    field, message = refusal(summarise, data, fmt)
    assert field == "train.data"
    assert words in message
    assert not message.startswith("data: ")


def test_jsonl_may_hold_every_character_that_json_allows() -> None:
    found = list(read_rows('{"a": "x\u2028y\u0085z\\ud83d\\ude00"}\r\n{"a": ""}\n'.encode(), "jsonl"))
    assert found == [{"a": "x\u2028y\u0085z\U0001f600"}, {"a": ""}]


def test_a_column_may_be_named_by_a_number() -> None:
    given = train("{0}: ", "{1} {{}}")
    assert check(given, rows({"0": "a", "1": "b"})).example_prompt == "a: "
    assert render(given.data, {"0": "a", "1": "b"}, 1) == ("a: ", "b {}")


def test_statistics_of_a_column() -> None:
    column = rows(*({"t": "x" * n} for n in range(1, 201))).columns["t"]
    assert (column.mean, column.p99, column.longest, column.empty) == (100.5, 198, 200, 0)
    assert len(column.percentiles) == 101


def test_lengths_are_bytes_so_that_other_scripts_count_more() -> None:
    assert rows({"t": "日本語"}).columns["t"].longest == 9


def test_empty_cells_nulls_and_duplicates_are_counted() -> None:
    summary = rows({"t": " ", "u": 1}, {"t": "x", "u": 1}, {"t": "x", "u": 1}, {"t": None, "u": 2})
    assert summary.duplicates == 1
    assert (summary.columns["t"].empty, summary.columns["t"].first_null) == (2, 4)
    assert (summary.columns["u"].mean, summary.columns["u"].first_null) == (1.0, None)


def test_a_column_that_some_rows_lack_names_the_first_of_them() -> None:
    assert rows({"a": 1}, {"a": 1, "b": 2}).columns["b"].first_null == 1
    assert rows({"a": 1, "b": 2}, {"a": 1}).columns["b"].first_null == 2
    assert rows({"a": 1, "b": 2}, {"a": 1}, {"a": 1, "b": 3}).columns["b"].first_null == 2


@pytest.mark.parametrize(
    ("config", "field", "words"),
    [
        (train(prompt="{wrod}"), "train.data.prompt", "no column 'wrod' in the data; it has word, definition, note"),
        (train(completion="{wrod}"), "train.data.completion", "no column 'wrod'"),
        (train(prompt="{word"), "train.data.prompt", "write {column}"),
        (train(completion="{definition:>9}"), "train.data.completion", "not a plain column name"),
        (train(prompt="{note}"), "train.data.prompt", "column 'note' is null or missing in row 2"),
        (train(global_batch=3), "train.global_batch", "2 training rows (3 minus 1 held out) are fewer than"),
    ],
)
def test_a_spec_that_the_data_cannot_serve(config: TrainConfig, field: str, words: str) -> None:
    summary = rows(*({"word": f"w{n}", "definition": "d", "note": None if n else "n"} for n in range(3)))
    found, message = refusal(check, config, summary)
    assert found == field
    assert words in message
    assert not message.startswith(field.removeprefix("train."))


def test_completions_that_are_all_empty_teach_nothing() -> None:
    summary = rows(*({"word": "w", "definition": " "} for _ in range(3)))
    field, message = refusal(check, train(), summary)
    assert (field, "nothing to learn" in message) == ("train.data.completion", True)
    assert check(train(completion="{definition}."), summary).rows == 3


def test_warnings_for_what_is_allowed_but_doubtful() -> None:
    summary = rows(*({"word": "w", "definition": "x" * 900 if n else ""} for n in range(10)))
    report = check(train(max_length=64, data={"eval_share": 0}), summary)
    said = " | ".join(report.warnings)
    assert report.truncated_share == pytest.approx(0.9)
    assert "about 90% of the rows are longer than max_length 64" in said
    assert "8 rows are duplicates" in said
    assert "column 'definition' is empty in 1 rows" in said
    assert "no row is held out" in said


def test_a_clean_data_set_has_no_warnings() -> None:
    assert check(train(), rows(*({"word": f"w{n}", "definition": "d"} for n in range(40)))).warnings == ()


cells = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(st.lists(st.fixed_dictionaries({"word": cells, "definition": cells}), min_size=2, max_size=30))
def test_the_estimate_covers_the_rows_that_the_trainer_reads(found: list[dict[str, str]]) -> None:
    data = json.dumps(found).encode()
    summary = summarise(data, "json")
    config = train(completion="= {definition}")
    assert check(config, summary).rows == len(list(read_rows(data, "json")))
    estimate = rows_of(config, summary)
    longest = max(len(f"Define {r['word']}:= {r['definition']}".encode()) for r in found)
    assert estimate.tokens_longest >= longest / 2.4
    mean = sum(len(f"Define {r['word']}:= {r['definition']}".encode()) for r in found) / len(found)
    assert estimate.tokens_mean == pytest.approx(max(1.0, mean / 3.6))


@given(st.lists(st.integers(0, 300), min_size=1, max_size=200))
@example(list(range(100)))
def test_percentiles_are_the_nearest_ranks(lengths: list[int]) -> None:
    column = rows(*({"t": "x" * n} for n in lengths)).columns["t"]
    ordered = sorted(lengths)
    expected = tuple(ordered[max(1, -(-p * len(ordered) // 100)) - 1] for p in range(101))
    assert column.percentiles == expected


@pytest.mark.parametrize(
    ("data", "row"),
    [
        ({}, {"completion": "a"}),
        ({"completion": "", "chosen": "{good}", "rejected": "{bad}"}, {"good": "a", "bad": "b"}),
        ({"completion": "", "chosen": "{good}", "rejected": "{bad}"}, {"good": "a", "bad": None}),
    ],
)
def test_messages_are_asked_only_where_both_answers_are_chats(data: dict[str, Any], row: dict[str, Any]) -> None:
    """The check accepts the same prompts as the trainer, and refuses others with the trainer's message."""
    asked = [{"role": "user", "content": "q"}]
    answer = [{"role": "assistant", "content": "a"}]
    config = train("{q}", "{completion}", data=data, task="dpo" if data else "causal_lm")
    field, message = refusal(check, config, rows({"q": asked, **{n: v or answer for n, v in row.items()}}))
    assert field == "train.data.prompt"
    assert message == (
        "row 1: column 'q' is neither text, nor a finite number, nor a date; make it text or drop the row"
    )
    if data:
        assert check(config, rows({"q": asked, "good": answer, "bad": answer})).rows == 1


def test_a_column_of_chats_is_checked_in_every_row() -> None:
    good = {"c": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    config = train(data={"messages": "c", "prompt": "", "completion": ""})
    assert check(config, rows(good, good)).rows == 2
    assert refusal(check, config, rows(good, {"c": [{"role": "user", "content": "a"}]}))[1].startswith(
        "row 2: column 'c' has no message of the assistant"
    )
    assert refusal(check, config, rows({"c": "hello"}))[0] == "train.data.messages"
    assert (
        "no column 'd'" in refusal(check, train(data={"messages": "d", "prompt": "", "completion": ""}), rows(good))[1]
    )
    assert "null or missing in row 2" in refusal(check, config, rows(good, {"c": None}))[1]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"path": "a.csv"}, "task causal_lm needs data.completion, or data.messages"),
        ({"path": "a.csv", "messages": "c", "prompt": "{x}"}, "data.prompt: task causal_lm with messages has no use"),
    ],
)
def test_data_that_a_task_cannot_use_is_refused(data: dict[str, str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate({"model": "a/b", "data": data})


def classes(**data: Any) -> TrainConfig:
    wanted = {"path": "moods.csv", "prompt": "{t}", "label": "mood", **data}
    task = {"model": "a/b", "task": "text_classification", "data": wanted, "global_batch": 1, "micro_batch": 1}
    return TrainConfig.model_validate(task)


def test_the_labels_are_found_before_anything_is_bought() -> None:
    found = rows({"t": "a", "mood": "good"}, {"t": "b", "mood": "bad"}, {"t": "c", "mood": "good"})
    assert check(classes(), found).labels == ("bad", "good")
    assert check(classes(labels=["good", "bad", "none"]), found).labels == ("good", "bad", "none")
    assert refusal(check, classes(labels=["good", "none"]), found) == (
        "train.data.labels",
        "moods.csv row 2: label 'bad' is not among data.labels (good, none); mend the row, or add it",
    )


def test_a_column_of_another_label_in_each_row_is_doubtful() -> None:
    strange = "column 'mood' has a different label in each of 3 rows; check that it holds classes"
    moods = [("a", "good"), ("b", "bad"), ("c", "none")]
    assert strange in check(classes(), rows(*({"t": t, "mood": mood} for t, mood in moods))).warnings
    assert strange not in check(classes(), rows(*({"t": t, "mood": mood} for t, mood in [*moods, moods[0]]))).warnings


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["good", "good"], "has only the label 'good'"),
        (["good", " "], "row 2: column 'mood' is empty"),
        (["good", None], "null or missing in row 2"),
        ([f"l{n}" for n in range(1001)], "more than 1000 labels"),
    ],
)
def test_unlearnable_labels_are_refused(cells: list[Any], message: str) -> None:
    field, said = refusal(check, classes(), rows(*({"t": "a", "mood": cell} for cell in cells)))
    assert field == "train.data.label"
    assert message in said


def test_cells_that_are_no_numbers_are_named_by_row() -> None:
    config = classes().model_copy(update={"task": "text_regression"})
    assert check(config, rows({"t": "a", "mood": 1}, {"t": "b", "mood": "2.5"})).labels == ()
    field, said = refusal(check, config, rows({"t": "a", "mood": 1}, {"t": "b", "mood": "much"}))
    assert (field, said[:6]) == ("train.data.label", "row 2:")


def test_tags_are_found_in_lists_and_in_texts() -> None:
    data = {"path": "a.jsonl", "words": "w", "label": "t"}
    task = {"model": "a/b", "task": "token_classification", "data": data, "global_batch": 1, "micro_batch": 1}
    config = TrainConfig.model_validate(task)
    assert check(config, rows({"w": ["a", "b"], "t": ["O", "B-X"]}, {"w": ["c"], "t": ["I-X"]})).labels == (
        "B-X",
        "I-X",
        "O",
    )
    report = check(config, rows({"w": "a b", "t": "O B-X"}, {"w": "c", "t": "O"}))
    assert (report.labels, report.example_prompt) == (("B-X", "O"), "a b")
    field, said = refusal(check, config, rows({"w": ["a"], "t": ["O"]}, {"w": 7, "t": ["O"]}))
    assert (field, said) == (
        "train.data.label",
        "column 't' has only the label 'O'; give at least two classes",
    )
    bad = rows({"w": ["a"], "t": ["O"]}, {"w": 7, "t": ["B-X"]})
    assert refusal(check, config, bad)[1].startswith("row 2: column 'w' is not a list of words")


def test_a_class_of_pictures_is_that_of_their_folders() -> None:
    data = {"path": "p.tar", "image": "image", "label": "label", "eval_share": 0.5}
    task = {"model": "a/b", "task": "image_classification", "data": data, "global_batch": 1, "micro_batch": 1}
    config = TrainConfig.model_validate(task)
    good = b"\x89PNG\r\n\x1a\n"
    files = {"cat/1.png": good + b"1", "cat/2.png": good + b"2", "dog/1.png": good + b"1"}
    summary = summarise(tar(files), "tar")
    assert DataSummary.model_validate_json(summary.model_dump_json()) == summary
    report = check(config, summary)
    assert (report.rows, report.labels, report.example_prompt) == (3, ("cat", "dog"), "cat/1.png")
    assert summary.duplicates == 0, "the same picture in two classes is another row"
    assert rows_of(config, summary).count == 3
    broken = summarise(tar(files | {"dog/0.png": b"<html>"}), "tar")
    assert refusal(check, config, broken)[1].startswith("row 3: column 'image' is not a picture")
    assert "'label' is null or missing in row 1" in refusal(check, config, summarise(tar({"0.png": good}), "tar"))[1]


def test_a_picture_and_its_caption() -> None:
    data = {"path": "p.tar", "image": "image", "prompt": "a drawing of a {label}", "eval_share": 0.5}
    task = {"model": "a/b", "task": "text_to_image", "data": data, "global_batch": 1, "micro_batch": 1}
    config = TrainConfig.model_validate(task)
    good = b"\x89PNG\r\n\x1a\n"
    report = check(config, summarise(tar({"cat/1.png": good, "dog/1.png": good + b"1"}), "tar"))
    assert (report.example_prompt, report.example_completion) == ("a drawing of a cat", "cat/1.png")
    broken = summarise(tar({"cat/1.png": good, "dog/1.png": b"GIF9"}), "tar")
    assert refusal(check, config, broken)[1].startswith("row 2: column 'image' is not a picture")


@pytest.mark.parametrize("task", ["dpo", "reward_model"])
def test_both_answers_of_a_preference_are_checked(task: str) -> None:
    data = {"path": "a.csv", "prompt": "{q}", "chosen": "{good}", "rejected": "{bad}"}
    config = TrainConfig.model_validate(
        {"model": "a/b", "task": task, "data": data, "global_batch": 1, "micro_batch": 1}
    )
    report = check(config, rows({"q": "a", "good": "yes", "bad": "no"}, {"q": "b", "good": "yes", "bad": "no"}))
    assert (report.example_prompt, report.example_completion) == ("a", "yes")
    blank = rows({"q": "a", "good": "yes", "bad": ""}, {"q": "b", "good": "yes", "bad": " "})
    assert refusal(check, config, blank)[0] == "train.data.rejected"
    assert refusal(check, config, rows({"q": "a", "good": "yes"}))[1].startswith("no column 'bad'")

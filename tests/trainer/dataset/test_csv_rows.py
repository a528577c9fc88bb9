"""CSV as people save it: delimiters are found, and never guessed where commas already divide the cells."""

import csv
import io
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.preflight.dataset import summarise
from trainer.contract.data_config import DataFormat
from trainer.dataset import csv_rows, readers
from trainer.dataset.prompts import DataError

ROWS = [{"word": "tide", "definition": "rise, and fall"}, {"word": "quay", "definition": 'a "place"; stone'}]


def written(delimiter: str, first: str = "") -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["word", "definition"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return (first + text.getvalue()).encode()


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_cells_are_read_by_any_usual_delimiter_with_a_notice(delimiter: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trainer.dataset"):
        assert list(readers.read_rows(written(delimiter), "csv")) == ROWS
    assert ["cells are separated by" in record.message for record in caplog.records] == [True] * (delimiter != ",")


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "^"])
def test_the_first_line_of_excel_names_the_delimiter(delimiter: str) -> None:
    assert list(readers.read_rows(written(delimiter, f"sep={delimiter}\r\n"), "csv")) == ROWS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("text\nyes; no\nmaybe\n", [{"text": "yes; no"}, {"text": "maybe"}]),
        ("a;b\n1;2\n3;4;5\n", [{"a;b": "1;2"}, {"a;b": "3;4;5"}]),
        ("a,b;c\n1,2;3\n", [{"a": "1", "b;c": "2;3"}]),
        ("text\n", []),
    ],
)
def test_a_delimiter_on_which_not_all_lines_agree_is_text(text: str, expected: list[dict[str, str]]) -> None:
    assert list(readers.read_rows(text.encode(), "csv")) == expected


@settings(max_examples=100)
@given(
    st.lists(
        st.text(st.characters(codec="ascii", exclude_characters=",\n\r\0\x1c\x1d\x1e\x85"), max_size=8),
        min_size=1,
        max_size=6,
    )
)
def test_files_with_commas_are_read_as_before(texts: list[str]) -> None:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerows([["a", "b"], *([text, "x"] for text in texts)])
    assert csv_rows.find_delimiter(text.getvalue().splitlines(keepends=True)) == ","


def test_wrong_cells_are_named_with_the_delimiter() -> None:
    rows = list(readers.each_row(b"a;b\n1;2\n1;2\n1;2\n1;2\n1;2;3\n", "csv", "f.csv"))
    assert str(rows[-1]) == "f.csv line 6: more cells than the header's 2; quote cells that hold semicolons"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("fmt", ["csv", "jsonl", "json"])
def test_utf_16_is_named_also_without_a_mark(encoding: str, fmt: DataFormat) -> None:
    with pytest.raises(DataError, match="is UTF-16; save the file as UTF-8"):
        list(readers.read_rows('word,definition\n"tide",rise\n'.encode(encoding), fmt))


def test_the_ending_tsv_is_known() -> None:
    assert readers.format_of("rows.tsv", None) == "csv"


def test_a_tsv_with_a_comma_in_its_header_is_read_by_tabs() -> None:
    text = b"word\tname, as written\nquay\tstone, old\n"
    uneven = b"word\tname, as written\nquay\tstone\n"
    expected = [{"word": "quay", "name, as written": "stone, old"}]
    assert list(readers.each_row(text, "csv", "words.TSV")) == expected
    assert list(readers.read_rows(uneven, "csv")) == [{"word": "quay", "name, as written": "stone"}]
    assert list(readers.each_row(b"a,b\n1,2\n", "csv", "words.tsv")) == [{"a": "1", "b": "2"}]


def test_an_upload_of_a_tsv_is_read_as_the_file() -> None:
    """An upload has no name: neither the daemon nor the rented machine knows that the file's name ended in .tsv."""
    text = b"word\tname, as written\nquay\tstone, old\ntide\trise, fall\n"
    assert list(summarise(text, "csv").columns) == ["word", "name, as written"]
    assert list(readers.each_row(text, "csv", "data")) == list(readers.each_row(text, "csv", "words.tsv"))


@pytest.mark.parametrize("lines", [3, 40, 90])
def test_a_cell_of_many_lines_hides_no_delimiter(lines: int) -> None:
    cell = "\n".join(["tide"] * lines)
    text = f'a;b\n1;2\n3;"{cell}"\n'
    assert list(readers.read_rows(text.encode(), "csv")) == [{"a": "1", "b": "2"}, {"a": "3", "b": cell}]


def test_lines_are_counted_with_the_line_that_names_the_delimiter() -> None:
    rows = list(readers.each_row(b"sep=;\na;b\n1;2\n1;2;3\n", "csv", "f.csv"))
    assert str(rows[-1]).startswith("f.csv line 4: more cells than the header's 2")
    with pytest.raises(DataError, match=r"^f\.csv line 2: the header names 'a' twice"):
        list(readers.each_row(b"sep=;\na;a\n1;2\n", "csv", "f.csv"))

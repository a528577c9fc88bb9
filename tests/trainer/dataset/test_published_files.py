"""Files in the forms of published data sets: GLUE's TSV, lists in pandas' CSV, JSON lines in .json, compression."""

import base64
import csv
import gzip
import io
import json
import logging

import numpy
import pytest

from broker.preflight import dataset as daemon
from tests.trainer.support.pack import tar
from trainer.contract.data_config import DataFormat
from trainer.contract.train import TrainConfig
from trainer.dataset import cells, readers
from trainer.dataset.prompts import DataError

MRPC = (
    "Quality\t#1 String\t#2 String\n"
    '1\tHe called " the witness " .\tReferring to " the witness " .\n'
    '0\t" I am here .\tHe is here .\n'
    '1\t"Yes" he said\t"No"\n'
    '0\tplain\t" open at the end\n'
)
"""Rows of the kind of GLUE's MRPC, which is read with quoting off."""


def table(text: str) -> list[list[str]]:
    return [list(row.values()) for row in readers.read_rows(text.encode(), "csv")]


def test_stray_quotes_of_a_tsv_are_characters(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trainer.dataset"):
        rows = table(MRPC)
    assert rows == [
        ["1", 'He called " the witness " .', 'Referring to " the witness " .'],
        ["0", '" I am here .', "He is here ."],
        ["1", '"Yes" he said', "No"],
        ["0", "plain", '" open at the end'],
    ]
    assert "quotes that no other quote closes are read as characters" in caplog.text


def test_stray_quotes_far_below_the_header_are_characters() -> None:
    lines = ["a\tb", *(f"{n}\tx" for n in range(200)), '"open\ty', *(f"{n}\tz" for n in range(40))]
    assert table("\n".join(lines))[200:202] == [['"open', "y"], ["0", "z"]]


@pytest.mark.parametrize(
    "text",
    [
        'a\tb\n1\t"two\nlines"\n2\tx\n',
        'a\tb\n1\t"two\n\nlines"\n2\tx\n',
        'a\tb\n"1\t1"\tx\n2\ty\n',
        'a\tb\n"x ""y"""\tz\n1\t2\n',
    ],
)
def test_quoted_cells_of_a_tsv_keep_tabs_and_lines(text: str) -> None:
    assert table(text) == list(csv.reader(io.StringIO(text), delimiter="\t"))[1:]


def test_quotes_after_spaces_are_quotes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trainer.dataset"):
        assert table('a, b\n"x, y", "z, w"\n1, "2, 3"\n') == [["x, y", "z, w"], ["1", "2, 3"]]
    assert "spaces after a delimiter are left out" in caplog.text
    assert table("a,b\nx, y\n") == [["x", " y"]]


PANDAS = [
    (str(["EU", "it's", "a b"]), ["EU", "it's", "a b"]),
    (str(numpy.array(["EU", "rejects", "x"], dtype=object)), ["EU", "rejects", "x"]),
    (str(numpy.array(["w" * 30] * 9, dtype=object)), ["w" * 30] * 9),
]
"""Cells as `to_csv` writes lists and arrays of texts."""


@pytest.mark.parametrize(("cell", "expected"), PANDAS, ids=["list", "array", "array of several lines"])
def test_lists_in_python_or_numpy_notation_are_lists(cell: str, expected: list[str]) -> None:
    assert cells.words(cell) == expected
    assert cells.tags(cell) == expected


def test_whole_numbers_in_numpy_notation_are_tags() -> None:
    assert cells.tags(str(numpy.array([3, 0, 17]))) == ["3", "0", "17"]
    assert cells.tags(str(numpy.arange(60))) == [str(n) for n in range(60)]


@pytest.mark.parametrize("cell", ["['a' 'b' ... 'c']", "['a', 'b'", "['a\nb']", "['a''b']"])
def test_a_list_that_is_cut_off_is_refused_alike(cell: str) -> None:
    assert cells.words(cell) is cells.tags(cell) is None
    assert not cells.is_a("words", cell)
    assert cells.is_a("words", "[CLS] a ]")


def test_the_daemon_reads_tags_of_json_text_as_the_trainer() -> None:
    """A split at white space would make the class `["O",` and refuse every row."""
    rows = b'words,tags\n"[""a"", ""b""]","[""O"", ""B-X""]"\n"[""c""]","[""O""]"\n'
    data = {"path": "t.csv", "words": "words", "label": "tags", "labels": ["O", "B-X"], "eval_share": 0}
    fields = {"model": "a/b", "task": "token_classification", "data": data, "global_batch": 1}
    train = TrainConfig.model_validate(fields)
    assert daemon.check(train, daemon.summarise(rows, "csv")).labels == ("O", "B-X")
    train = TrainConfig.model_validate({**fields, "data": {**data, "labels": []}})
    assert daemon.check(train, daemon.summarise(rows, "csv")).labels == ("B-X", "O")


ROWS = [{"a": 1}, {"a": 2}]
LINES = "\n".join(map(json.dumps, ROWS)).encode()


@pytest.mark.parametrize(
    ("text", "declared"),
    [
        (LINES, "json"),
        (b"\xef\xbb\xbf" + LINES, "json"),
        (b'{"a": 1}\n\n{"a": 2}\n', "json"),
        (json.dumps(ROWS).encode(), "jsonl"),
        (json.dumps(ROWS, indent=1).encode(), "jsonl"),
        (b"\xef\xbb\xbf" + json.dumps(ROWS).encode(), "jsonl"),
    ],
)
def test_json_is_read_by_its_form_with_a_notice(
    text: bytes, declared: DataFormat, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trainer.dataset"):
        assert list(readers.read_rows(text, declared)) == ROWS
    assert "and is read as " in caplog.text


def test_one_bad_line_does_not_make_a_list_of_lines() -> None:
    rows = list(readers.each_row(b'[oops\n{"a": 1}\n', "jsonl"))
    assert [isinstance(row, DataError) for row in rows] == [True, False]
    lists = list(readers.each_row(b'[{"a": 1}]\n[{"a": 2}]\n', "jsonl", "f"))
    assert [str(row) for row in lists] == [f"f line {n}: is not an object; map columns to values" for n in (1, 2)]
    for one in (b'{\n"a": 1\n}\n', b'{"a": 1}\n', b'{"a": 1}\n]'):
        with pytest.raises(DataError, match="must be a list of objects"):
            list(readers.read_rows(one, "json"))


@pytest.mark.parametrize("declared", ["csv", "json", "jsonl"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(b"a,b\n1,2\n", mtime=0), "is compressed by gzip; unpack it"),
        (b"PK\3\4\x14\0\6\0", "an Excel workbook; save the sheet as CSV"),
        (b"PAR1\x15\x04\x15\x10", "is a Parquet file; set data.format to parquet"),
    ],
)
def test_files_that_are_no_text_are_named(content: bytes, words: str, declared: DataFormat) -> None:
    with pytest.raises(DataError, match=words):
        list(readers.read_rows(content, declared))


def test_the_endings_of_compressed_files_are_named() -> None:
    for name in ("rows.jsonl.gz", "rows.csv.zst", "rows.json.XZ"):
        with pytest.raises(DataError, match="is compressed; unpack it"):
            readers.format_of(name, None)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_blank_lines_before_the_header_are_left_out(delimiter: str) -> None:
    text = "\n\r\n" + "".join(f"{first}{delimiter}{second}\n" for first, second in (("a", "b"), *[("1", "2")] * 4))
    assert table(text) == [["1", "2"]] * 4
    rows = list(readers.each_row(f"{text}5{delimiter}6{delimiter}7\n".encode(), "csv", "f.csv"))
    assert str(rows[-1]).startswith("f.csv line 8: more cells than the header's 2")
    with pytest.raises(DataError, match=r"^f\.csv line 3: the header names 'a' twice"):
        list(readers.each_row(b"\n\na,a\n1,2\n", "csv", "f.csv"))


def test_an_archive_of_several_parts_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """The layout of `imagefolder`: pictures for a test would be trained on without a word."""
    png = b"\x89PNG"
    with caplog.at_level(logging.WARNING, "trainer.dataset"):
        files = {"d/train/cat/1.png": png, "d/train/dog/1.png": png, "d/test/cat/1.png": png}
        assert [row["label"] for row in readers.read_rows(tar(files), "tar")] == ["cat", "cat", "dog"]
    assert "data: has the parts ['test', 'train'], and all are read; pack one of them" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "trainer.dataset"):
        list(readers.read_rows(tar({"train/cat/1.png": png, "train/dog/1.png": png, "x/test/1.png": png}), "tar"))
    assert not caplog.text


def test_base64_of_mime_is_a_picture() -> None:
    content = b"\x89PNG" + bytes(200)
    assert cells.picture(base64.encodebytes(content).decode()) == content
    assert cells.picture("\n" + base64.b64encode(content).decode()) == content


def test_underscores_do_not_make_a_number() -> None:
    assert cells.number("12_3") is None
    assert cells.number(" 1.5e3 ") == 1500

"""A JSON array that is read item by item equals a whole read, wherever the chunks of the file end."""

import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.preflight.dataset import summarise
from trainer.dataset import json_stream as arrays
from trainer.dataset.json_stream import BadJson, NoArray
from trainer.dataset.prompts import DataError
from trainer.dataset.readers import each_row, read_rows

MB = 1_000_000
FILE = 50 * MB
cells = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=80)
values = st.recursive(cells, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner), max_leaves=8)


def read(text: str, piece: int) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "PIECE", piece)
        found = list(arrays.items(io.StringIO(text)))
    assert [json.loads(item.text) for item in found] == [item.value for item in found]
    return [item.value for item in found]


def read_at_once(text: str) -> list[Any] | int | None:
    """Return the items, or the line of the first error; None if the text is not an array."""
    if text.lstrip(" \t\n\r")[:1] != "[":
        return None
    try:
        return list(json.loads(text))
    except json.JSONDecodeError as e:
        return e.lineno


pieces = st.sampled_from([1, 2, 7, 40, 1 << 16])
written = st.builds(
    lambda found, indent, escaped: json.dumps(found, indent=indent, ensure_ascii=escaped),
    st.lists(values, max_size=6), st.sampled_from([None, 0, 2]), st.booleans(),
)  # fmt: skip


@given(written, pieces)
def test_a_streamed_array_equals_a_whole_read(text: str, piece: int) -> None:
    assert read(text, piece) == json.loads(text)


@given(written, pieces, st.data())
def test_broken_json_is_refused_at_the_same_line_as_by_a_whole_read(text: str, piece: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text)))
    broken = text[:at] + data.draw(st.sampled_from(["", "]", ",", '"', "x", "\\", "1", "{"])) + text[at + 1 :]
    broken = data.draw(st.sampled_from([broken, text[:at]]))
    expected = read_at_once(broken)
    try:
        found: list[Any] | int | None = read(broken, piece)
    except NoArray:
        found = None
    except BadJson as e:
        found = e.line
    assert found == expected


@pytest.mark.parametrize("text", ["[NaN, -Infinity, 1e5, -0.5E-3]", "[1e400]", " [ ] ", "[[[]], {}]"])
@pytest.mark.parametrize("piece", [1, 3])
def test_numbers_and_white_space_at_every_end_of_a_piece(text: str, piece: int) -> None:
    assert str(read(text, piece)) == str(json.loads(text))


@pytest.mark.parametrize("text", ["[" * 200_000, '[{"a": ' + "1" * 5000 + "}]"], ids=["deep", "long number"])
def test_json_that_python_cannot_represent_is_refused(text: str) -> None:
    with pytest.raises(BadJson) as caught:
        read(text, 1 << 16)
    assert caught.value.line == 1


def test_rows_before_the_place_that_is_wrong_come_and_the_place_is_named() -> None:
    text = '[\n{"a": 1},\n7,\n{"a": "\\udc00"},\n{"a": 2}\n{"a": 3}]'
    found = each_row(text.encode(), "json", "words.json")
    assert next(found) == {"a": 1}
    assert str(next(found)) == "words.json row 2: is not an object; map columns to values"
    assert str(next(found)).startswith("words.json row 3: \\ud800 to \\udfff are halves")
    assert next(found) == {"a": 2}
    with pytest.raises(
        DataError, match=r"^words\.json line 6: not JSON \(a comma .*\); for one object a line use jsonl"
    ):
        next(found)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "rows.json"
    row = json.dumps({"prompt": "p" * 400, "completion": "ü" * 200}, ensure_ascii=False, indent=1)
    with path.open("w") as file:
        file.write("[")
        for number in range(FILE // len(row.encode())):
            file.write(f"{',' if number else ''}\n{row}")
        file.write("]\n")
    assert path.stat().st_size > 0.95 * FILE
    return path


def test_a_large_file_is_never_in_memory(large: Path) -> None:
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_rows(large, "json"))
        assert summarise(large, "json").rows == count > 50_000
        assert tracemalloc.get_traced_memory()[1] < FILE / 10
    finally:
        tracemalloc.stop()

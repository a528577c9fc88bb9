"""Sources of data sets: several files, buckets and the Hub, each fetched once and identified by its content."""

import asyncio
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import arro3.core
import obstore
import pytest
from arro3.io import write_parquet

from tests.grants.gate import gated
from tests.trainer.support.dataset_server import BUCKET, DATASET, GATED, KEY, TOKEN, Shelves, served
from trainer.contract.data_config import DataConfig
from trainer.dataset import sources as places
from trainer.dataset.prompts import DataError
from trainer.dataset.readers import each_row, read_rows
from trainer.dataset.sources import LocalDataset, Unreachable
from trainer.objectstore.objects import connect

ROWS = [b"a,b\n1,x\n2,y\n", b'{"a": "3", "b": "z"}\n']


def parquet(**columns: list[Any]) -> bytes:
    made = {name: arro3.core.Array(cells, type=kind(cells)) for name, cells in columns.items()}
    buffer = io.BytesIO()
    write_parquet(arro3.core.Table.from_pydict(made), buffer)
    return buffer.getvalue()


def kind(cells: list[Any]) -> Any:
    kinds = {int: arro3.core.DataType.int64, str: arro3.core.DataType.utf8, bytes: arro3.core.DataType.binary}
    return kinds[type(next(c for c in cells if c is not None))]()


@pytest.fixture
def shelves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelves]:
    shelves = Shelves(files={
        "2026/one.csv": ROWS[0], "2026/two.jsonl": ROWS[1], "2026/notes.txt": b"-", "2025/old.csv": b"a,b\n0,w\n",
    })  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    with served(shelves):
        yield shelves


def rows(path: str, beside: Path, env: dict[str, str] | None = None, **more: Any) -> tuple[str, str, list[Any]]:
    """Return (format, name, rows)."""
    data = DataConfig(path=path, completion="{a}", **more)
    with places.gather(data, beside, env or {}) as found:
        return found.format, found.name, list(each_row(found.path, found.format, path))


def cells(found: tuple[str, str, list[Any]]) -> list[Any]:
    return [row["a"] if isinstance(row, dict) else row for row in found[2]]


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("*.csv", ["a.csv"]),
        ("**/*.csv", ["a.csv", "d/e.csv", "d/f/g.csv"]),
        ("d/*", ["d/e.csv"]),
        ("d/", ["d/e.csv", "d/f/g.csv"]),
        ("{a,b}.{csv,jsonl}", ["a.csv", "b.jsonl"]),
        ("[ab].*", ["a.csv", "b.jsonl"]),
        ("[!a].jsonl", ["b.jsonl"]),
        ("?.csv", ["a.csv"]),
        ("d(e).csv", []),
    ],
)
def test_a_pattern_means_what_a_shell_means(pattern: str, wanted: list[str]) -> None:
    names = ["a.csv", "b.jsonl", "d/e.csv", "d/f/g.csv", ".hidden.csv", "d/.git/x.csv"]
    assert places.matching(names, pattern) == wanted


@pytest.mark.parametrize(
    "pattern", ["*a" * 8 + "b", "**/" * 12 + "x", "**a" * 12 + "b", "?*" * 12 + "b", "{*a,a*}" * 6 + "b"]
)
def test_a_pattern_of_many_wildcards_is_matched_in_linear_time(pattern: str) -> None:
    """Backtracking over these names takes hours; the budget of positions bounds the work on any others."""
    names = [f"{n}/" * n + "a" * 500 + "c" for n in range(100)]
    started = time.process_time()
    assert places.matching(names, pattern) == []
    assert time.process_time() - started < 20


def test_wildcards_match_every_name_that_they_describe() -> None:
    assert places.matching(["a/b/x", "x", "ax", "a/x/y"], "**/x") == ["a/b/x", "x"]
    assert places.matching(["&", "[", "\\", "d", "7"], "[[&\\d]") == ["&", "[", "\\", "d"], "no regular expression"
    assert places.matching(["a/b", "a.b", "aXb"], "a[!X]b") == ["a.b"]
    assert places.matching(["aXbXb", "a/b", "ab", "abc"], "a*b") == ["aXbXb", "ab"]
    assert places.matching(["a/p/b/q/c", "abc", "acb"], "a**b**c") == ["a/p/b/q/c", "abc"]
    assert places.matching(["ac", "bc", "c"], "{a,{b,}}c") == ["ac", "bc", "c"]


REFUSED_PATTERNS = [
    ("{a,b}" * 40, "more than 64 alternatives"),
    ("{" + "a," * 64 + "}", "more than 64 alternatives"),
    ("[z-a].csv", "range z-a"),
]


@pytest.mark.parametrize(("pattern", "part"), REFUSED_PATTERNS)
@pytest.mark.parametrize("place", ["", "s3://bucket/", "hf://datasets/ambrose/cynic/"])
def test_a_pattern_that_is_too_wide_is_refused_unlisted(tmp_path: Path, place: str, pattern: str, part: str) -> None:
    with pytest.raises(DataError, match=f"^data.path: its pattern has .*{part}"):
        rows(place + pattern, tmp_path)


def test_matching_ends_at_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.dataset.name_patterns.WORK", 1000)
    names = ["".join("ab"[n >> bit & 1] for bit in range(12)) for n in range(4096)]
    with pytest.raises(DataError, match="takes too long to match; use fewer wildcards"):
        places.matching(names, "*a" + "?" * 10 + "b*")


def test_several_files_are_one_data_set_and_a_bad_row_names_its_own(tmp_path: Path) -> None:
    (tmp_path / "d/more").mkdir(parents=True)
    (tmp_path / "d/one.csv").write_bytes(ROWS[0] + b"5\n")
    (tmp_path / "d/more/two.jsonl").write_bytes(ROWS[1])
    (tmp_path / "d/three.parquet").write_bytes(parquet(a=["4"], b=["v"]))
    found = rows("d/**/*.*", tmp_path)
    assert found[:2] == ("tar", "data.tar")
    assert cells(found)[:3] == ["3", "1", "2"], "in the order of their names"
    assert str(cells(found)[3]).startswith("d/**/*.* one.csv line 4: fewer cells than the header's 2")
    assert cells(found)[4] == "4"
    assert cells(rows("d", tmp_path))[:3] == ["3", "1", "2"], "a folder is all of its files"
    assert cells(rows("d/{one}.csv", tmp_path))[:2] == ["1", "2"]
    with pytest.raises(DataError, match=r"nothing is there for 'd/\*.xml'"):
        rows("d/*.xml", tmp_path)


def test_parquet_has_cells_as_json_would(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(parquet(a=["1", None], n=[7, 8], image=[b"\x89PNG...", None]))
    fmt, name, found = rows("x.parquet", tmp_path)
    assert (fmt, name) == ("parquet", "x.parquet")
    assert [(row["a"], row["n"]) for row in found] == [("1", 7), (None, 8)]
    assert (found[0]["image"].start(4), found[1]["image"]) == (b"\x89PNG", None)


@pytest.mark.parametrize("cut", [0, 4, 50, -9])
def test_a_parquet_file_that_is_torn_is_refused_by_name(cut: int) -> None:
    with pytest.raises(DataError, match="is not a Parquet file that can be read; write it again"):
        list(read_rows(parquet(a=["1", "2"])[:cut], "parquet"))


def test_a_bucket_is_read_by_the_named_credentials_and_each_object_once(shelves: Shelves, tmp_path: Path) -> None:
    env, path = {"MY_S3": shelves.options()}, f"s3://{BUCKET}/2026/*.{{csv,jsonl}}"
    assert cells(rows(path, tmp_path, env, secret="MY_S3")) == ["1", "2", "3"]
    assert sorted(shelves.fetched) == ["2026/one.csv", "2026/two.jsonl"]
    assert cells(rows(path, tmp_path, env, secret="MY_S3")) == ["1", "2", "3"]
    assert len(shelves.fetched) == 2, "what is kept is not fetched again"
    shelves.files["2026/one.csv"] = b"a,b\n9,x\n"
    assert cells(rows(path, tmp_path, env, secret="MY_S3")) == ["9", "3"]
    assert shelves.fetched[2:] == ["2026/one.csv"]
    assert rows(f"s3://{BUCKET}/2025/old.csv", tmp_path, env, secret="MY_S3")[:2] == ("csv", "old.csv")


async def test_a_bucket_of_s3_is_listed_and_read_below_its_prefix(shelves: Shelves, tmp_path: Path) -> None:
    """The bucket is moto's, so its answers were not written for this test."""
    async with gated() as gate:
        bucket, env = connect(gate.place, gate.options()), {"MY_S3": json.dumps(gate.options())}
        for name, content in {"rows/one.csv": ROWS[0], "rows/two.jsonl": ROWS[1], "rowsnot.csv": b"a\n7\n"}.items():
            await obstore.put_async(bucket, name, content)
        found = await asyncio.to_thread(rows, f"{gate.place}/rows/", tmp_path, env, secret="MY_S3")
        single = await asyncio.to_thread(rows, f"{gate.place}/rowsnot.csv", tmp_path, env, secret="MY_S3")
    assert cells(found) == ["1", "2", "3"]
    assert cells(single) == ["7"]
    assert shelves.fetched == []


def test_a_bucket_of_google_is_read_by_the_named_credentials(shelves: Shelves, tmp_path: Path) -> None:
    def options(token: str) -> str:
        return json.dumps({"google_base_url": shelves.url, "google_bearer_token": token})

    env, path = {"MY_GCS": options(KEY), "BAD": options("nobody's")}, f"gs://{BUCKET}/2026/*.{{csv,jsonl}}"
    assert cells(rows(path, tmp_path, env, secret="MY_GCS")) == ["1", "2", "3"]
    assert cells(rows(path, tmp_path, env, secret="MY_GCS")) == ["1", "2", "3"]
    assert sorted(shelves.fetched) == ["2026/one.csv", "2026/two.jsonl"], "each once"
    assert rows(f"gs://{BUCKET}/2025/old.csv", tmp_path, env, secret="MY_GCS")[:2] == ("csv", "old.csv")
    with pytest.raises(DataError, match="may not be read with the credentials in BAD"):
        rows(path, tmp_path, env, secret="BAD")


def test_a_buckets_refusal_is_one_line_with_the_fix(shelves: Shelves, tmp_path: Path) -> None:
    env = {"BAD": shelves.options("AKIANOBODY"), "TORN": "{", "GOOD": shelves.options()}
    with pytest.raises(DataError, match="may not be read with the credentials in BAD"):
        rows(f"s3://{BUCKET}/2026/one.csv", tmp_path, env, secret="BAD")
    with pytest.raises(DataError, match=r"data.secret: TORN is not a JSON object of the store's options here"):
        rows(f"s3://{BUCKET}/2026/one.csv", tmp_path, env, secret="TORN")
    with pytest.raises(DataError, match=f"there is no 's3://{BUCKET}/gone.csv'; check bucket and key"):
        rows(f"s3://{BUCKET}/gone.csv", tmp_path, env, secret="GOOD")


def test_a_dataset_of_the_hub_is_its_part_for_training(shelves: Shelves, tmp_path: Path) -> None:
    shelves.files = {
        "README.md": b"-", "data/train-00000-of-00002.parquet": parquet(a=["1"]),
        "data/train-00001-of-00002.parquet": parquet(a=["2"]), "data/test-00000-of-00001.parquet": parquet(a=["3"]),
    }  # fmt: skip
    env, path = {"HF_ENDPOINT": shelves.url}, f"hf://datasets/{DATASET}"
    assert cells(rows(path, tmp_path, env)) == ["1", "2"]
    assert cells(rows(path, tmp_path, env)) == ["1", "2"]
    assert len(shelves.fetched) == 2, "what the Hub's cache has is not fetched again"
    assert cells(rows(f"{path}@main/data/test-*", tmp_path, env)) == ["3"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (f"hf://datasets/{GATED}", "is gated; accept its terms at http://127.0.0.1:.*/datasets/corp/gated, and set MY"),
        ("hf://datasets/corp/none", "the Hub has no 'hf://datasets/corp/none' for this token; check http"),
        (f"hf://datasets/{DATASET}@gone", "the Hub has no"),
        ("hf://datasets/words", "is not a dataset; write hf://datasets/owner/name"),
    ],
)
def test_a_refusal_of_the_hub_is_one_line_with_the_fix(path: str, words: str, shelves: Shelves, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words) as caught:
        rows(path, tmp_path, {"HF_ENDPOINT": shelves.url, "MY": TOKEN}, secret="MY")
    assert TOKEN not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_place_that_is_silent_is_not_the_jobs_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(Unreachable, match=r"no usable answer from http://127\.0\.0\.1:9/datasets/a/b"):
        rows("hf://datasets/a/b", tmp_path, {"HF_ENDPOINT": "http://127.0.0.1:9"})


def test_an_archive_has_the_same_bytes_wherever_its_files_lay(shelves: Shelves, tmp_path: Path) -> None:
    (tmp_path / "2026").mkdir()
    for name in ("one.csv", "two.jsonl"):
        (tmp_path / "2026" / name).write_bytes(shelves.files[f"2026/{name}"])
    env = {"S": shelves.options()}

    def content(path: str, **more: Any) -> bytes:
        with places.gather(DataConfig(path=path, completion="x", **more), tmp_path, env) as found:
            assert isinstance(found, LocalDataset)
            return found.path.read_bytes()

    assert content("2026/*.*") == content(f"s3://{BUCKET}/2026/[ot]*.[cj]*", secret="S")


def test_surrogates_and_bytes_of_each_format_are_reported_by_row() -> None:
    lines = b'{"a": "\xff"}\n{"a": 1}\n' + json.dumps({"a": "\ud800"}).encode()
    found = list(each_row(lines, "jsonl"))
    assert [isinstance(row, DataError) for row in found] == [True, False, True]

"""Memory-mapped rows: exact, in little memory, and shared by all processes of a machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.support import tiny_jobs
from tests.trainer.support import tiny_models as heads
from tests.trainer.support.tiny_jobs import KINDS
from trainer import tasks
from trainer.batching import mmap_dataset as kept
from trainer.batching.examples import Example
from trainer.batching.mmap_dataset import DatasetWriter, MmapDataset
from trainer.contract.train import TrainConfig
from trainer.core.errors import DataFault
from trainer.core.ipc import ROWS, rows_note
from trainer.dataset.prompts import digest
from trainer.dataset.readers import each_row
from trainer.tasks.common.example_reader import ExampleReader
from trainer.tasks.common.task import Task
from trainer.tasks.text.labelled_text import Labelled
from trainer.tasks.text.preference_pairs import Preference
from trainer.tasks.text.seq2seq import Pair
from trainer.tasks.text.token_classification import TaggedWords

MB = 1_000_000
ids = st.lists(st.integers(-100, 2**31 - 1), max_size=8)
spans = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=2).map(tuple)
examples = st.builds(Example, ids=ids, prompt=st.integers(0, 9), silent=spans)
KEPT: dict[type, Any] = {
    Example: examples,
    Preference: st.builds(Preference, chosen=examples, rejected=examples),
    Pair: st.builds(Pair, ids=ids, labels=ids, number=st.integers(1)),
    Labelled: st.builds(Labelled, ids=ids, label=st.one_of(st.text(), st.floats(allow_nan=False))),
    TaggedWords: st.builds(
        TaggedWords, ids=ids, starts=st.lists(st.none() | st.integers(0, 9)), tags=st.lists(st.text(max_size=3))
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KEPT)
def test_a_mapped_dataset_returns_its_rows(kind: type, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("rows")

    @settings(max_examples=30, deadline=None)
    @given(st.lists(KEPT[kind], max_size=4))
    def comes_back(made: list[Any]) -> None:
        writer = DatasetWriter(folder, kind)
        for one in made:
            writer.append(one)
        assert rows_note(folder) is None, "no reader uses an incomplete file"
        writer.close({"rows": len(made)})
        mmap_dataset = MmapDataset(folder, kind)
        assert [list(mmap_dataset), mmap_dataset[-9:9], rows_note(folder)] == [made, made, {"rows": len(made)}]
        with pytest.raises(IndexError):
            mmap_dataset[len(made)]

    comes_back()


def held_mb() -> float:
    """Return the anonymous memory of this process in MB. Mapped pages are excluded, because the kernel may drop
    them.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1000


def csv(number: int) -> bytes:
    return b"%d,%s\n" % (number, b"w" * 4000)


def jsonl(number: int) -> bytes:
    return b'{"a": %d, "b": "%s"}\n' % (number, b"w" * 4000)


@pytest.mark.parametrize(("make", "fmt", "head"), [(csv, "csv", b"a,b\n"), (jsonl, "jsonl", b"")])
def test_a_file_larger_than_the_memory_is_read(
    make: Callable[[int], bytes], fmt: Any, head: bytes, tmp_path: Path
) -> None:
    path, rows = tmp_path / "large", 27_000
    with path.open("wb") as file:
        file.write(head)
        file.writelines(map(make, range(rows)))
    assert path.stat().st_size > 100 * MB
    before, most, count = held_mb(), 0.0, 0
    for row in each_row(path, fmt):
        count += isinstance(row, dict)
        if count % 3_000 == 0:
            most = max(most, held_mb() - before)
    assert (count, most < 20) == (rows, True), most


def test_many_rows_are_taken_in_any_order_and_never_all_in_memory(tmp_path: Path) -> None:
    count = 6_500
    numbers = list(range(300, 4_300))
    before = held_mb()
    writer = DatasetWriter(tmp_path, Example)
    for first in range(count):
        numbers[0] = first
        writer.append(Example(ids=numbers, prompt=1))
    writer.close({})
    assert (tmp_path / ROWS).stat().st_size > 100 * MB
    train, held = kept.train_eval_split(MmapDataset(tmp_path, Example), 17, 0.1)
    seen = [row.ids[0] for part in (train, held) for row in part]
    assert held_mb() - before < 20
    assert sorted(seen) == list(range(count))
    assert seen != sorted(seen)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Task[Any]]:
    folder = tmp_path_factory.mktemp("tokenizer")
    heads.tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')

    def made(**changes: Any) -> Task[Any]:
        data = {"path": "rows.csv", "prompt": "{word} ", "completion": "{meaning}"}
        return tasks.build_task(TrainConfig.model_validate({"model": str(folder), "data": data, **changes}))

    return made


def test_rewriting_rows_does_not_truncate_another_processs_mapping(tmp_path: Path) -> None:
    """One process rewrites the rows while another reads them; the reader's mapping keeps its length."""

    def written(count: int) -> MmapDataset[Example]:
        writer = DatasetWriter(tmp_path, Example)
        for number in range(count):
            writer.append(Example(ids=[number] * 5_000, prompt=1))
        writer.close({})
        return MmapDataset(tmp_path, Example)

    first = written(9)
    written(1)
    assert first[8].ids[0] == 8


def test_rows_are_tokenised_once_until_an_input_changes(
    task: Callable[..., Task[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows depend on data, task, lengths, columns and tokenizer."""
    path = tmp_path / "rows.csv"
    path.write_bytes(tiny_jobs.data(KINDS["causal_lm lora"]))
    read: list[Any] = []
    of = ExampleReader._read_rows
    monkeypatch.setattr(ExampleReader, "_read_rows", lambda self, *given: (read.append(1), of(self, *given))[1])
    one = digest(path)
    first = list(task().examples(path, "csv", cache=tmp_path, data_sha256=one)[0])
    assert list(task().examples(path, "csv", cache=tmp_path, data_sha256=one)[0]) == first
    assert len(read) == 1
    task(max_length=8).examples(path, "csv", cache=tmp_path, data_sha256=one)
    assert list(task().examples(path, "csv")[0]) == first
    path.write_bytes(path.read_bytes() + b"\n" + path.read_bytes().splitlines()[-1])
    task().examples(path, "csv", cache=tmp_path, data_sha256=digest(path))
    assert len(read) == 4


def test_rows_of_another_file_than_was_hashed_are_not_kept(task: Callable[..., Task[Any]], tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(tiny_jobs.data(KINDS["causal_lm lora"]))
    hashed = digest(path)
    path.write_bytes(path.read_bytes() + b"\n" + path.read_bytes().splitlines()[-1])
    with pytest.raises(DataFault, match=r"rows.csv has changed since it was hashed; start again"):
        task().examples(path, "csv", cache=tmp_path, data_sha256=hashed)
    assert rows_note(tmp_path) is None

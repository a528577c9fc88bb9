"""Unusable pictures and chats are reported as bad rows with their position, and never replaced silently."""

import errno
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.trainer.batching.test_chats import turn
from tests.trainer.support import tiny_models as heads
from tests.trainer.support import workers
from trainer import preflight, tasks
from trainer.contract.train import TrainConfig
from trainer.core.errors import DataFault
from trainer.dataset.archives import Picture
from trainer.dataset.prompts import DataError
from trainer.tasks.common import image_loading as pictures


def picture(array: Any, form: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(array).save(out, form)
    return out.getvalue()


def held(content: bytes) -> Picture:
    return Picture(name="a/1.tif", size=len(content), start=lambda count: content[:count])


RAMP = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)


@pytest.mark.parametrize(("form", "order"), [("PNG", "<u2"), ("TIFF", "<u2"), ("TIFF", ">u2")])
def test_a_picture_of_16_bits_is_the_one_of_8(form: str, order: str) -> None:
    found = np.asarray(pictures.decode(held(picture(RAMP.astype(order), form))))
    assert found.shape == (16, 16, 3)
    assert (found == np.arange(256, dtype=np.uint8).reshape(16, 16, 1)).all()


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_a_picture_of_numbers_without_a_white_is_a_bad_row(kind: Any) -> None:
    content = picture(np.full((4, 4), 9, kind), "TIFF")
    with pytest.raises(DataError, match=r"^rows row 7 \(a/1.tif\): does not decode \(its pixels are numbers"):
        pictures.image_of({"image": held(content)}, "image", "rows", 7)


@pytest.mark.parametrize("read", [0, 1], ids=["the beginning", "the whole"])
def test_a_disk_that_does_not_read_is_not_the_row_s_fault(read: int) -> None:
    content, begun = picture(np.zeros((4, 4), np.uint8)), iter(range(2))

    def start(count: int) -> bytes:
        if next(begun) == read:
            raise OSError(errno.EIO, "Input/output error")
        return content[:count]

    cell = Picture(name="a/1.png", size=len(content), start=start)
    with pytest.raises(OSError, match="Input/output error"):
        pictures.image_of({"image": cell}, "image", "rows", 7)


FAULTS = ["1 + 'a'", "'abc'.index('z')", "'{a}'.format()", "1 // 0", "raise_exception('no')"]


@pytest.mark.parametrize("fault", FAULTS, ids=["type", "value", "key", "arithmetic", "own"])
def test_a_row_that_the_template_refuses_is_a_bad_row(fault: str, tmp_path: Path) -> None:
    model = heads.llama(tmp_path / "llama")
    tokenizer = heads.tokenizer()
    condition = "{% if messages[0].content == 'w9' %}{{ " + fault + " }}{% endif %}"
    tokenizer.chat_template = condition + "{% for m in messages %}{{ m.content }} <eos>{% endfor %}"
    tokenizer.save_pretrained(model)
    rows = [{"chat": [turn("user", said), turn("assistant", "w2")]} for said in ("w1", "w9", "w3")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"path": "rows.jsonl", "messages": "chat"}
    train = TrainConfig.model_validate({"model": str(model), "data": data, "global_batch": 1, "max_length": 16})
    trained = tasks.build_task(train)
    with pytest.raises(DataFault):
        trained.examples(tmp_path / "rows.jsonl", "jsonl")
    (said,) = trained.data.reader.faults
    assert said.startswith("rows.jsonl row 2: the model's chat template refuses the chat (")
    (tmp_path / "train.json").write_text(train.model_dump_json(exclude_defaults=True))
    report = preflight.check(tmp_path / "train.json")
    assert (report.code, report.bad) == (65, [said])


def test_a_column_that_only_the_first_row_lacks_is_that_row_s_fault(tmp_path: Path) -> None:
    model = heads.llama(tmp_path / "llama")
    rows = [{"q": "w1"}, {"q": "w2", "a": "w3"}, {"q": "w4", "a": "w5"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"path": "rows.jsonl", "prompt": "{q}", "completion": "{a}", "bad_share": 0.5}
    fields: dict[str, Any] = {"model": str(model), "data": data, "global_batch": 1, "max_length": 16}
    trained = tasks.build_task(TrainConfig.model_validate(fields))
    assert len(trained.examples(tmp_path / "rows.jsonl", "jsonl")[0]) == 2
    assert trained.data.reader.faults == ["rows.jsonl row 1: no column 'a'; every row needs it"]
    for rows_there in (3, 300):  # a name that no row has is the setting's fault, also before all of a file was read
        text = "\n".join(map(json.dumps, [{"q": "w1"}] * rows_there))
        (tmp_path / "rows.jsonl").write_text(text if rows_there < 100 else text + "\n{")
        with pytest.raises(DataFault, match=r"^data.completion: no column 'a' in the data; it has q$"):
            trained.examples(tmp_path / "rows.jsonl", "jsonl")


def test_fewer_rows_than_a_step_takes_are_refused_as_by_the_preflight(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "model": str(heads.llama(tmp_path / "llama")), "global_batch": 3, "max_length": 16, "max_steps": 1,
        "data": {"path": "rows.csv", "prompt": "{q}", "completion": "{a}", "eval_share": 0.3},
    }  # fmt: skip
    train = TrainConfig.model_validate(fields)
    (tmp_path / "rows.csv").write_text("q,a\nw1,w2\nw3,w4\nw5,w6\n")
    (tmp_path / "train.json").write_text(train.model_dump_json(exclude_defaults=True))
    report = preflight.check(tmp_path / "train.json")
    ended = workers.Worker(tmp_path / "run", train, tmp_path / "rows.csv").start().end()
    said = "train.global_batch: 2 rows to train on are fewer than 3; lower it, or give more rows"
    assert (report.code, report.problem) == (ended.code, ended.message) == (64, said)

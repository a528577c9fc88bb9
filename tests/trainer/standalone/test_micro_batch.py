"""`micro_batch: auto` alone: as many rows as the tracer says that fit."""

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.support import tiny_models as heads
from trainer.contract.train import TrainConfig
from trainer.standalone import micro_batch as fit

peaks = st.integers(1, 80 * fit.GIB)


@given(peaks, st.integers(0, fit.GIB), st.integers(1, 200 * fit.GIB), st.integers(1, 64), st.integers(1, 64))
def test_auto_micro_batch_is_the_largest_fitting_divisor(
    one: int, each: int, memory: int, batch: int, gpus: int
) -> None:
    most = -(-batch // gpus)
    rows = fit.fitting(one, one + each, memory=memory, max_rows=most, batch=batch)

    def fits(count: int) -> bool:
        return one + (count - 1) * each + fit.CONTEXT <= memory * fit.SHARE

    assert batch % rows == 0
    assert rows == 1 or (rows <= most and fits(rows))
    assert not any(fits(more) for more in range(rows + 1, most + 1) if batch % more == 0)


def in_process(argv: Sequence[str]) -> str:
    from accelerate.state import AcceleratorState

    from trainer.memtrace import __main__ as memtrace_main

    AcceleratorState._reset_state(True)  # another test of this process may have set another precision
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert memtrace_main.main(argv) == 0
    return out.getvalue()


def test_rows_are_those_of_the_tracer(tmp_path: Path) -> None:
    model = heads.llama(tmp_path / "llama")
    train = TrainConfig.model_validate(
        {"model": str(model), "data": {"path": "d", "completion": "{a}"}, "global_batch": 64, "max_length": 4096}
    )
    traced = {rows: fit._peak(train, rows, 1, in_process) for rows in (1, 2)}
    each = traced[2] - traced[1]
    assert each > 0
    memory = int((traced[1] + 19.5 * each + fit.CONTEXT) / fit.SHARE)

    def known(argv: Sequence[str]) -> str:
        return f'{{"peak_allocated_bytes": {traced[int(argv[argv.index("--micro-batch") + 1])]}}}'

    found, told = fit.sized(train, memory=memory, processes=1, trace=known)
    assert (found.micro_batch, found.global_batch) == (16, 64)
    assert told.startswith("micro_batch auto: 16, by the tracer ")
    found, _ = fit.sized(train, memory=memory * 9, processes=8, trace=known)
    assert found.micro_batch == 8


def test_several_processes_have_ddps_buckets_as_well(tmp_path: Path) -> None:
    """DDP's buckets are as large as the gradients; a full fine-tune has a gradient for every weight."""
    fields = {"model": str(heads.llama(tmp_path / "llama")), "data": {"path": "d", "completion": "{a}"}}
    train = TrainConfig.model_validate({**fields, "method": {"kind": "full"}, "global_batch": 64, "max_length": 512})
    alone, beside = (fit._peak(train, 1, processes, in_process) for processes in (1, 4))
    document = json.loads(in_process(["--config", f"{train.model}/config.json", "--method", "full", "--seq", "8"]))
    assert beside - alone == pytest.approx(document["by_category"]["weights"], rel=0.1)


@pytest.mark.parametrize(
    "more",
    [
        {"method": {"kind": "qlora"}},
        {"optim": {"name": "adafactor"}},
        {"task": "seq2seq", "data": {"path": "d", "prompt": "{a}", "completion": "{a}"}},
    ],
)
def test_an_untraceable_model_keeps_the_default_micro_batch(more: dict[str, object], tmp_path: Path) -> None:
    def refuse(argv: Sequence[str]) -> str:
        raise OSError

    (tmp_path / "config.json").write_text("{}")
    fields = {"model": str(tmp_path), "data": {"path": "d", "completion": "{a}"}}
    train = TrainConfig.model_validate({**fields, **more})
    found, told = fit.sized(train, memory=fit.GIB, processes=1, trace=refuse)
    assert found == train
    assert told.startswith("micro_batch auto: 4, since")

"""The trainer's pure rules: data order, learning rate, dead-man's switch, redaction and the log's bounds."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trainer.agent.dead_man_switch import DeadMan
from trainer.agent.upload.log_buffer import CHUNK_BYTES, TAIL_BYTES, LogBuffer, Redactor
from trainer.batching import sampler as order
from trainer.contract.data_config import USES, DataConfig
from trainer.contract.train import TrainConfig
from trainer.optim import learning_rates

seeds = st.integers(0, 2**31 - 1)


@given(seeds, st.integers(1, 60), st.integers(0, 300), st.integers(0, 40), st.integers(0, 40))
def test_cursor_cuts_the_stream_anywhere(seed: int, rows: int, start: int, first: int, second: int) -> None:
    whole = order.step_rows(seed, start, first + second, rows)
    assert whole == order.step_rows(seed, start, first, rows) + order.step_rows(seed, start + first, second, rows)


@given(seeds, st.integers(1, 60), st.integers(0, 5))
def test_every_epoch_sees_every_row_once(seed: int, rows: int, epoch: int) -> None:
    assert sorted(order.step_rows(seed, epoch * rows, rows, rows)) == list(range(rows))


def test_epochs_and_seeds_differ() -> None:
    assert order.step_rows(1, 0, 50, 50) != order.step_rows(1, 50, 50, 50) != order.step_rows(2, 50, 50, 50)


@given(seeds, st.integers(1, 200), st.floats(0, 0.99))
def test_split_is_a_partition(seed: int, rows: int, share: float) -> None:
    train, held = order.split(seed, rows, share)
    assert sorted(train + held) == list(range(rows))
    assert train
    assert bool(held) == (share > 0 and rows > 1)


def test_learning_rate_warms_up_then_falls_to_zero() -> None:
    rates = [learning_rates.learning_rate(1.0, 0.1, step, 100) for step in range(100)]
    assert rates[:10] == [pytest.approx((i + 1) / 10) for i in range(10)]
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.001
    assert learning_rates.learning_rate(2e-4, 0.0, 0, 1) == 2e-4


def test_steps_are_counted_by_epochs_and_batch() -> None:
    config = TrainConfig(model="m", data=DataConfig(path="x.csv", completion="{a}"), global_batch=8, epochs=1.5)
    assert learning_rates.total_steps(config, 100) == math.ceil(150 / 8)
    assert learning_rates.total_steps(config.model_copy(update={"max_steps": 3}), 100) == 3


def test_deadman_counts_only_what_it_saw() -> None:
    switch = DeadMan(10)
    switch.observe(b"1", 0)
    switch.observe(b"1", 9)
    assert not switch.expired
    switch.observe(b"2", 10)
    switch.observe(b"2", 19)
    assert not switch.expired, "a change starts from zero"
    switch.unreadable()
    switch.observe(b"2", 1000)
    assert not switch.expired, "a store that cannot be read is not a broker that is gone"
    switch.observe(b"2", 1001)
    assert switch.expired


def test_an_absent_lease_expires_the_deadman_and_limit_0_disables_it() -> None:
    switch, never = DeadMan(5), DeadMan(0)
    for now in (0, 5):
        switch.observe(None, now)
        never.observe(None, now * 1e6)
    assert switch.expired
    assert not never.expired


@given(st.lists(st.integers(1, 7), max_size=30))
def test_a_secret_is_hidden_however_the_output_is_cut(cuts: list[int]) -> None:
    output = b"token is hunter2-hunter2 ok\nagain hunter2-hunter2"
    log = LogBuffer(Redactor({"TOKEN": "hunter2-hunter2"}))
    for cut in cuts:
        log.feed(output[:cut])
        output = output[cut:]
    log.feed(output)
    log.end()
    assert log.chunk() == b"token is [redacted TOKEN] ok\nagain [redacted TOKEN]\n"
    assert log.chunk() == b""


def test_a_secret_in_an_endless_line_is_hidden() -> None:
    log = LogBuffer(Redactor({"TOKEN": "hunter2-hunter2"}))
    for _ in range(3000):
        log.feed(b"x" * 97 + b"hunter2-hunter2")
    log.end()
    shipped = b"".join(iter(log.chunk, b""))
    assert b"hunter2-hunter2" not in shipped.replace(b"\n", b"")
    assert shipped.count(b"[redacted TOKEN]") >= 2990


def test_every_line_of_a_secret_is_hidden() -> None:
    hide = Redactor({"KEY": "first line\nsecond line"})
    assert hide("has second line here") == "has [redacted KEY] here"


def test_chunks_are_bounded_and_whole_lines() -> None:
    log = LogBuffer(Redactor({}))
    log.feed(b"".join(b"%05d %s\n" % (i, b"y" * 100) for i in range(10_000)))
    chunks = list(iter(log.chunk, b""))
    assert all(len(c) <= CHUNK_BYTES and c.endswith(b"\n") for c in chunks)
    assert len(b"".join(chunks).splitlines()) == 10_000


def test_a_truncated_log_says_so() -> None:
    log_buffer = LogBuffer(Redactor({}), max_held_bytes=1000)
    log_buffer.feed(b"".join(b"line %d\n" % i for i in range(1000)))
    assert b"log truncated" in (first := log_buffer.chunk())
    assert first.endswith(b"line 999\n")
    heard: list[str] = []
    bounded = LogBuffer(Redactor({"TOKEN": "hunter2-hunter2"}), total=1000, echo=heard.append)
    bounded.feed(b"".join(b"line %d\n" % i for i in range(100_000)))
    text = b"".join(iter(bounded.chunk, b""))
    assert text.startswith(b"line 0\n")
    assert b"log truncated" in text.splitlines()[-1]
    assert len(text) < 1100
    bounded.feed(b"Traceback: hunter2-hunter2")
    bounded.end()
    bounded.close()
    end = b"".join(iter(bounded.chunk, b""))
    assert end.endswith(b"line 99999\nTraceback: [redacted TOKEN]\n"), "why it failed comes last"
    assert end.startswith(b"[log truncated: ")
    assert len(end) < TAIL_BYTES + 100
    assert heard == [f"line {i}" for i in range(100_000)] + ["Traceback: [redacted TOKEN]"]


@pytest.mark.parametrize(
    ("changes", "family", "width", "lr", "said"),
    [
        ({"global_batch": 128, "method": {"kind": "full"}}, "llama", 2000, 5e-5, "Schulman"),
        ({"global_batch": 128}, "llama", 4096, 2.86e-4, "times 10 for LoRA"),
        ({"global_batch": 128}, "qwen3", 4096, 4.73e-4, "hidden size)^0.0775 for qwen3"),
        ({"global_batch": 64}, "llama", 2000, 3.54e-4, "64 rows for 128"),
        ({"global_batch": 1}, "llama", 2000, 2.5e-4, "root of the batch"),
        ({"global_batch": 128}, "llama", 32, 8.43e-4, "hidden size"),
        ({"optim": {"name": "adafactor"}, "global_batch": 128}, "llama", 4096, 1e-2, "Raffel"),
    ],
)
def test_a_rate_that_is_left_to_the_trainer_is_a_published_one(
    changes: dict[str, Any], family: str, width: int, lr: float, said: str
) -> None:
    config = TrainConfig.model_validate({"model": "m", "data": {"path": "d", "completion": "{a}"}, **changes})
    found = learning_rates.published(config, family, width)
    assert found.lr == pytest.approx(lr, rel=1e-2)
    assert said in found.source


def test_every_task_has_a_rate_but_not_with_sgd() -> None:
    for task, (((needed, _), *_)) in USES.items():
        fields = {"model": "m", "task": task, "data": {"path": "d", **dict.fromkeys(needed, "a")}}
        found = learning_rates.published(TrainConfig.model_validate(fields), "bert", 768)
        assert 1e-6 < found.lr < 1e-2
        assert found.source
    with pytest.raises(ValidationError, match="give a number"):
        TrainConfig.model_validate({**fields, "optim": {"name": "sgd"}})

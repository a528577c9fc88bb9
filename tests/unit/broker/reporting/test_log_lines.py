"""The end of a log, and logs with times."""

from datetime import UTC, datetime
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.reporting.log_lines import (
    BLOCK_BYTES,
    MAX_BYTES,
    UNKNOWN_TIME,
    WHOLE_LOG,
    LogPart,
    last_lines,
    with_times,
)

AT = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("log", "count", "end"),
    [
        (b"", 2, b""),
        (b"a\nb\nc\n", 2, b"b\nc\n"),
        (b"a\nb\nc", 1, b"c"),
        (b"a\nb\n", 9, b"a\nb\n"),
        (b"a\n\n", 1, b"\n"),
    ],
)
def test_the_last_lines_of_a_log(log: bytes, count: int, end: bytes) -> None:
    assert last_lines(log, count) == end


def test_a_part_chooses_chunks_and_form() -> None:
    chunks = [(AT, b"a\nb\n")]
    part = LogPart(since=AT, timestamps=True, tail=1)
    assert [part.includes(at) for at in (AT, None, AT.replace(hour=11))] == [True, True, False]
    assert part.of(chunks) == b"2026-01-31T12:00:00Z b\n"
    assert (WHOLE_LOG.includes(AT), WHOLE_LOG.of(chunks)) == (True, b"a\nb\n")


def test_lines_have_the_time_of_their_chunk_and_stay_whole() -> None:
    shown = with_times([(AT, b"a\nbe"), (AT.replace(hour=13), b"gin\nc\n"), (None, b"d\n")]).decode()
    assert shown.splitlines() == [
        "2026-01-31T12:00:00Z a",
        "2026-01-31T12:00:00Z begin",
        "2026-01-31T13:00:00Z c",
        f"{UNKNOWN_TIME} d",
    ]


@given(st.lists(st.sampled_from([b"", b"\n", b"a", b"b\nc", b"\n\n"])))
def test_a_log_without_its_times_is_the_log(pieces: list[bytes]) -> None:
    log = with_times([(AT, piece) for piece in pieces])
    prefix = b"2026-01-31T12:00:00Z "
    assert all(line.startswith(prefix) for line in log.splitlines())
    assert log.replace(prefix, b"") == b"".join(pieces)


@pytest.mark.parametrize("count", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES])
def test_a_tail_may_span_blocks(count: int) -> None:
    log = b"\n" * (2 * BLOCK_BYTES + 5)
    assert len(last_lines(log, count)) == min(count, len(log))


def test_a_large_log_of_empty_lines_is_bounded_and_cheap() -> None:
    """A Python loop over its lines took 17 s of the event loop, and several gigabytes."""
    chunks = [(AT, b"\n" * (1 << 20))] * 64
    began = process_time()
    log = with_times(chunks)
    last_lines(log, 1_000_000)
    assert process_time() - began < 5
    assert MAX_BYTES < len(log) < 2 * MAX_BYTES
    assert log.startswith(b"(only the last ")

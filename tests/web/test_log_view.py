"""Parts of a log on its page: bounded, in whole lines, with the numbers of their lines."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from broker.domain.ids import JobId
from broker.web import log_view
from broker.web.log_view import log_around, log_end, log_search
from tests.api.harness import Running
from tests.web.test_pages import trained
from tests.web.visitor import Visitor
from trainer.contract import object_keys

TIMEOUT_S = 60.0
LOG = b"".join(b"step %d loss 0.5\n" % n for n in range(1, 5001))


def test_the_end_has_whole_lines_and_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_view, "SHOWN_BYTES", 100)
    end = log_end(LOG)
    assert end.text.startswith(f"step {end.first_line} loss")
    assert end.text.endswith("step 5000 loss 0.5\n")
    assert end.is_cut
    assert len(end.text) <= 100
    assert log_end(b"short\n").text == "short\n"
    assert not log_end(b"short\n").is_cut
    assert (log_end(b"x" * 500).text, log_end(b"x" * 500).first_line) == ("x" * 100, 1)  # one line without an end


def test_lines_around_a_match_begin_before_it() -> None:
    part = log_around(LOG, 3000)
    lines = part.text.splitlines()
    assert (part.first_line, lines[0], lines[100]) == (2900, "step 2900 loss 0.5", "step 3000 loss 0.5")
    assert log_around(LOG, 1).first_line == 1
    assert log_around(LOG, 10**9).text.endswith("step 5000 loss 0.5\n")
    assert log_around(b"", 5).text == ""


def test_a_search_ignores_case_and_counts_each_line_once() -> None:
    found = log_search(b"Error: a error\nfine\nERROR at end", "error")
    assert [(m.number, m.text) for m in found.matches] == [(1, "Error: a error"), (3, "ERROR at end")]
    assert found.total == 2
    assert log_search(LOG, "").total == log_search(LOG, "lost").total == log_search(b"", "x").total == 0


def test_a_search_is_bounded_and_keeps_the_latest_matches() -> None:
    found = log_search(LOG, "STEP")
    assert (found.total, len(found.matches)) == (5000, log_view.MATCHES)
    assert (found.matches[0].number, found.matches[-1].number) == (4501, 5000)
    assert found.matches[-1].text == "step 5000 loss 0.5"
    (long,) = log_search(b"y" * 5000, "y").matches
    assert len(long.text) == log_view.LINE_BYTES + 1
    assert log_search(b"\xff\xfe bytes\n", "BYTES").matches[0].text == "\ufffd\ufffd bytes"


class CountedBytes(bytes):
    """Bytes that count the searches in them."""

    searches = 0

    def find(self, *where: Any) -> int:
        CountedBytes.searches += 1
        return super().find(*where)


def test_a_line_is_found_without_a_step_for_each_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log of 64 MB of newlines took a thread for 50 s."""
    monkeypatch.setattr(CountedBytes, "searches", 0)
    log_around(CountedBytes(b"\n" * 1_000_000), 999_999_999)
    log_around(CountedBytes(b"\n" * 1_000_000), 900_000)
    assert CountedBytes.searches <= log_view.BLOCK_BYTES + 1


def test_a_search_stops_at_a_number_of_matches_with_the_latest() -> None:
    found = log_search(b"a\n" * 1_000_000, "a")
    assert (found.total, found.has_more) == (log_view.COUNTED, True)
    assert [m.number for m in found.matches[::499]] == [999_501, 1_000_000]
    exact = log_search(b"a\n" * log_view.COUNTED, "a")
    assert (exact.total, exact.has_more) == (log_view.COUNTED, False)


@pytest.mark.parametrize("block_bytes", [1, 2, 7, 100])
def test_blocks_change_no_line_and_no_match(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    raw = b"\n\nab\nxAB" + b"y" * 30 + b"ab\n\nlast ab\n\n"
    lines = raw.split(b"\n")
    monkeypatch.setattr(log_view, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(log_view, "BEFORE_LINES", 0)
    wanted = [(n, line.decode()) for n, line in enumerate(lines, 1) if b"ab" in line.lower()]
    assert [(m.number, m.text) for m in log_search(raw, "aB").matches] == wanted
    for number in range(1, len(lines)):
        part = log_around(raw, number)
        assert (part.first_line, part.text.encode()) == (number, b"\n".join(lines[number - 1 :]))


@pytest.mark.parametrize(
    "work",
    [
        lambda raw, check: log_around(raw, 10**9, check),
        lambda raw, check: log_around(raw, 900_000, check),
        lambda raw, check: log_search(raw, "absent", check),
        lambda raw, check: log_search(raw, "a", check),
        log_end,
    ],
)
def test_the_work_on_a_log_can_be_stopped(work: Callable[[bytes, Callable[[], None]], object]) -> None:
    left = iter(range(5))

    def check() -> None:
        if next(left, None) is None:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        work(b"a\n" * 1_000_000, check)


async def test_a_log_waits_for_no_quote_of_its_team(api: Running, ada: Visitor) -> None:
    job = await trained(api)
    entered, release = threading.Event(), threading.Event()

    def compute() -> None:
        entered.set()
        release.wait(TIMEOUT_S)

    quotes = api.service.quotes.threads
    (token,) = [token for token in await api.service.store.tokens() if token.owner == "ada"][:1]
    quoting = asyncio.create_task(quotes.of_team(token.team)(compute))
    try:
        assert await asyncio.to_thread(entered.wait, TIMEOUT_S)
        for query in ("", "?find=step", "?line=1"):
            assert (await ada.get(f"/ui/jobs/{job}/logs{query}")).status == 200
        assert not quoting.done()
    finally:
        release.set()
        await quoting


LINE = b"\x1b[31mERROR\x1b[0m <script>alert(1)</script> step %07d\n"


async def test_a_log_of_10_mb_is_searched_and_downloaded_bounded(api: Running, ada: Visitor) -> None:
    """Every line of the log has escape sequences and markup."""
    job = await trained(api)
    (attempt,) = await api.service.store.attempts(JobId(job))
    lines = 190_800
    for number, first in enumerate(range(0, lines, 3600)):
        text = b"".join(LINE % n for n in range(first, first + 3600))
        await api.service.blobs.put(object_keys.log_chunk(attempt.id, 0, "b", number), text)
    whole = b"".join(LINE % n for n in range(lines))
    assert len(whole) > 10_000_000
    end = await ada.get(f"/ui/jobs/{job}/logs")
    found = await ada.get(f"/ui/jobs/{job}/logs?find=STEP+0190799")
    many = await ada.get(f"/ui/jobs/{job}/logs?find=script")
    near = await ada.get(f"/ui/jobs/{job}/logs?line=90001")
    for page in (end, found, many, near):
        assert page.status == 200
        assert len(page.text) < 1_500_000
        assert "\x1b" not in page.text
        assert "<script>alert" not in page.text
    assert "logs?attempt=1&amp;line=190800" in found.text
    assert "The latest 500 of more than 100,000 lines" in many.text
    assert "step 0090000" in near.text
    assert "step 0190799" in end.text
    assert "step 0000001" not in end.text
    assert (await ada.get(f"/ui/jobs/{job}/logs.txt")).text.encode() == whole

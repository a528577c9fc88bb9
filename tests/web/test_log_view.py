"""Parts of a log on its page: bounded, in whole lines, with the numbers of their lines."""

import pytest

from broker.domain.ids import JobId
from broker.web import log_view
from broker.web.log_view import log_around, log_end, log_search
from tests.api.harness import Running
from tests.web.test_pages import trained
from tests.web.visitor import Visitor
from trainer.contract import object_keys

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
    assert "The latest 500 of 190,800 lines" in many.text
    assert "step 0090000" in near.text
    assert "step 0190799" in end.text
    assert "step 0000001" not in end.text
    assert (await ada.get(f"/ui/jobs/{job}/logs.txt")).text.encode() == whole

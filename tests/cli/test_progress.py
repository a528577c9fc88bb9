"""Progress output for a waiting user."""

import io
from decimal import Decimal

import pytest
from rich.console import Console

from broker.cli.core.output import Output
from broker.cli.views.progress import PlainDisplay, View, view
from broker.domain.job import JobState, Reason
from tests.cli.test_summary import attempt, job
from trainer.contract.documents import Heartbeat


def test_the_view_is_that_of_the_latest_attempt() -> None:
    first = attempt(1, None, 20, Reason.PREEMPTED)
    beat = Heartbeat(attempt="a" * 13, boot="c", seq=1, phase="loading", total_steps=0)
    second = attempt(2, 17, 17, Reason.STOPPED).model_copy(update={"beat": beat, "reason": None})
    running = job(first, second).model_copy(update={"state": JobState.ACTIVE})
    shown = view(running)
    assert (shown.step, shown.total) == (20, 45)  # progress so far, until the resumed attempt reports its own
    assert "loading" in shown.state
    assert "(simulated)" in shown.where
    training = beat.model_copy(
        update={"phase": "training", "step": 18, "total_steps": 45, "loss": 2.5, "tokens_per_s": 99.0}
    )
    second = second.model_copy(update={"beat": training})
    line = view(running.model_copy(update={"runs": (first, second)})).line()
    assert "step 18/45 · loss 2.500 · 99 tokens/s · $0.2000 of $1.0000" in line


def test_plain_lines_come_with_news_only(monkeypatch: pytest.MonkeyPatch) -> None:
    out, text, now = Output(as_json=False), io.StringIO(), 0.0
    out.console = Console(file=text, width=200)
    display = PlainDisplay(out, monotonic=lambda: now)
    base = View(
        state="a", where="", step=1, total=9, loss=None, tokens_per_s=None, spent=Decimal(0), cap=Decimal(1), left_s=90
    )  # fmt: skip
    display.show(base)
    display.show(base)
    display.show(View(**{**base.__dict__, "step": 2}))  # too soon
    now = 60.0
    display.show(View(**{**base.__dict__, "step": 3}))
    display.show(View(**{**base.__dict__, "step": 3, "state": "b"}))
    assert [line.split(" · ")[:2] for line in text.getvalue().split("\n") if line] == [
        ["          a", "step 1/9"],
        ["          a", "step 3/9"],
        ["          b", "step 3/9"],
    ]
    assert "1 min 30 s left" in text.getvalue()

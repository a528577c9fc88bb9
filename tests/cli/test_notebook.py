"""`fit` and the client's answers in a notebook; tests/cli/test_demo.py runs the example notebook in a real kernel."""

import asyncio
import threading
from asyncio import to_thread
from datetime import timedelta
from typing import Any

import pytest

import broker
from broker.api.schemas.jobs import EventView, JobDetail
from broker.api.schemas.metrics import MetricsView
from broker.client import fit as fitting
from broker.client.notebook import SHOWN_EVENTS, NotebookPanel, kernel_display
from broker.client.sync_client import Client
from broker.client.transport.errors import NotFinished
from broker.domain.job import JobState
from tests.api.harness import CSV, MODEL
from tests.api.test_files import admitted, put_checkpoint
from tests.cli.conftest import Shell
from tests.cli.test_python import NOON, end, waiting

TIMEOUT_S = 60.0
JOURNAL = b'{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.5}\n'


class ShownOutputs:
    """Records the outputs of a cell: the HTML of each, as it was drawn last, and the number of drawings."""

    def __init__(self) -> None:
        self.html: list[str] = []
        self.drawings = 0
        self.third = threading.Event()
        self.threads: set[int] = set()

    def display(self, shown: Any, *, display_id: bool) -> "ShownOutputs":
        assert display_id
        self.html.append("")
        self.update(shown)
        return self

    def update(self, shown: Any) -> None:
        self.html[-1] = shown._repr_html_()
        self.drawings += 1
        self.threads.add(threading.get_ident())
        if self.drawings == 3:
            self.third.set()


def event(n: int, message: str = "text") -> EventView:
    at = NOON + timedelta(seconds=n)
    return EventView(seq=n, at=at, kind=f"test.{n}", message=message, attempt_id=None, data={})


def test_a_panel_is_one_output_with_the_latest_events() -> None:
    outputs = ShownOutputs()
    panel = NotebookPanel(outputs.display)
    for n in range(9):
        panel(event(n, "<b>bold</b>\x1b[2J"))
    (html,) = outputs.html
    assert outputs.drawings == 9
    assert html.count("test.") == SHOWN_EVENTS
    assert "test.8: &lt;b&gt;bold" in html
    assert "\x1b" not in html + repr(panel)
    assert repr(panel).splitlines()[-1].startswith("12:00:08 test.8: <b>")


def test_scripts_have_no_panel() -> None:
    assert kernel_display() is None


async def test_fit_draws_a_panel_in_the_thread_of_the_cell(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, api = ShownOutputs(), shell.api
    monkeypatch.setattr(fitting, "kernel_display", lambda: outputs.display)
    monkeypatch.setattr(fitting, "POLL_S", 0.01)

    def notebook() -> None:
        async def cell() -> None:
            broker.fit(model=MODEL, data=[{"completion": f"x{n}"} for n in range(40)], cap_usd=2)

        with pytest.raises(NotFinished, match="no luck"):
            asyncio.run(cell())
        assert outputs.threads == {threading.get_ident()}

    running = asyncio.create_task(to_thread(notebook))
    job = await waiting(api)
    assert await to_thread(outputs.third.wait, TIMEOUT_S)
    await end(api, JobState.FAILED, "no luck")
    await running
    (html,) = outputs.html
    for shown in (f"fit · {job.id} · failed", "$0.0000 of at most $2.0000", "job.submitted", "job.failed: no luck"):
        assert shown in html


async def test_answers_are_tables_and_plots_in_a_notebook(shell: Shell) -> None:
    def use() -> tuple[str, str, str]:
        with Client() as client:
            upload = client.upload(CSV.encode(), name="words.csv")
            train = {"model": MODEL, "data": {"path": upload.ref, "completion": "{definition}"}}
            spec = {"name": "<cynic>", "cap_usd": "5", "train": train}
            impossible = {**spec, "cap_usd": "0.0001"}
            job = client.submit({**spec, "name": "cynic"}, key="k")
            quotes = client.quote({**spec, "name": "cynic"}), client.quote({**impossible, "name": "cynic"})
            return job.id, quotes[0]._repr_html_(), quotes[1]._repr_html_()

    job_id, quote, refused = await to_thread(use)
    assert "with 90 % chance at most $" in quote
    assert quote.count("<tr>") == 6
    assert "No offer fits." in refused
    attempt = await admitted(shell.api, job_id)
    await put_checkpoint(shell.api, job_id, attempt, 2, {"metrics.jsonl": JOURNAL})

    def read() -> tuple[JobDetail, MetricsView]:
        with Client() as client:
            return client.job(job_id), client.metrics(job_id)

    detail, series = await to_thread(read)
    assert "<table>" in detail._repr_html_()
    assert "difference" not in detail._repr_html_()
    assert "<polyline" in series._repr_html_()
    over = detail.model_copy(update={"state": JobState.SUCCEEDED, "name": "<b>"})
    assert "&lt;b&gt; · " in over._repr_html_()
    quoted = detail.runs[0].usd_p50
    assert ("difference" in over._repr_html_()) is (quoted is not None)

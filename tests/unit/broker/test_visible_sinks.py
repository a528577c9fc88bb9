"""No text of a host or a user controls a terminal, forges a line, or starts a formula, at any place that shows it."""

import ast
import csv
import io
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

import broker
from broker.api.schemas.jobs import EventView, JobDetail
from broker.api.schemas.spending import SpendRowView, SpendView
from broker.api.service.views import job_detail
from broker.cli.commands import spending
from broker.cli.core.exit_codes import BadInput
from broker.cli.core.output import Output, terminal_log
from broker.cli.core.table import Column, TerminalTable
from broker.cli.views import job_table, jobs
from broker.cli.views.progress import LiveDisplay, PlainDisplay, event_line, view
from broker.client import fit
from broker.daemon.log_setup import RedactingFormatter
from broker.domain.formatting import csv_cell, visible, visible_document
from broker.domain.job import Event
from broker.domain.notifications import Delivery, JobSnapshot
from broker.notify.log import LogNotifier
from broker.notify.slack.blocks import root
from broker.notify.slack.text import code, line, plain
from broker.notify.webhook.body import body
from tests.conformance.samples import START, make_attempt, make_job

ESC, CSI, BELL, OVERRIDE, ISOLATE, SEPARATOR, NEL = "\x1b", "\x9b", "\x07", "\u202e", "\u2066", "\u2028", "\x85"
FORGED = "2026-11-27 15:00:00,000 INFO gpubroker.events: forged"
HOSTILE = f"bad {ESC}]0;TITLE{BELL}{ESC}[2J{CSI}2J{OVERRIDE}txt.exe{ISOLATE}\x00\x08\x7f{SEPARATOR}{NEL}\r\n{FORGED}"
RAW = set(HOSTILE) - set(visible(HOSTILE)) - {"\n"}


def clean(shown: str) -> bool:
    """Return True if the text has no raw control character and no line begins with the forged one."""
    return not RAW & set(shown) and not any(part.startswith(FORGED) for part in shown.split("\n"))


def hostile_event() -> EventView:
    return EventView(seq=1, at=START, kind="attempt.ended", message=HOSTILE, attempt_id=None, data={})


# ------------------------------------------------------------------------------------------------------------ the rule


def test_controls_are_shown_and_plain_text_is_not_changed() -> None:
    assert visible("Grüße, 日本, 🟢 a b\\n") == "Grüße, 日本, 🟢 a b\\n"
    assert visible("a\x1b[31m\n\u202e\x9b") == "a\\u001b[31m\\n\\u202e\\u009b"
    assert visible("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\u001b"
    assert visible("\ud800").encode()
    assert visible(visible(HOSTILE)) == visible(HOSTILE)


def test_a_json_document_keeps_its_meaning() -> None:
    document = json.dumps({"message": HOSTILE}, ensure_ascii=False)
    assert json.loads(visible(document)) == {"message": HOSTILE}


def test_a_document_is_cleaned_at_every_depth() -> None:
    cleaned = visible_document({"a\x1b": ["\x1b", {"b": ("\u202e", 1, None, "two\nlines")}]})
    assert cleaned == {"a\\u001b": ["\\u001b", {"b": ["\\u202e", 1, None, "two\nlines"]}]}


@pytest.mark.parametrize(
    "text", ['=HYPERLINK("http://evil")', "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", " =1", "\u2028=1"]
)
def test_no_csv_cell_is_a_formula(text: str) -> None:
    shown = csv_cell(text)
    assert isinstance(shown, str)
    assert shown[0] in "'\\"


def test_numbers_of_a_csv_file_stay_numbers() -> None:
    assert csv_cell(-1.5) == -1.5


# ----------------------------------------------------------------------------------------------------------- the sinks


def log_line() -> str:
    return RedactingFormatter("%(name)s: %(message)s").format(
        logging.LogRecord("gpubroker", logging.INFO, "f", 1, "job %s", (HOSTILE,), None)
    )


def log_traceback() -> str:
    try:
        raise ValueError(HOSTILE)
    except ValueError as e:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "failed", None, (type(e), e, e.__traceback__))
    shown = RedactingFormatter("%(message)s").format(record)
    assert all(part.startswith("  ") for part in shown.split("\n")[1:])
    return shown


def slack_texts() -> str:
    job = make_job()
    job = replace(job, reason=HOSTILE, spec=job.spec.model_copy(update={"name": HOSTILE}), owner=HOSTILE)
    message = root(JobSnapshot(job=job, attempts=()))
    return "".join([message.text, json.dumps(message.blocks, ensure_ascii=False), line(HOSTILE), code(HOSTILE)]) + str(
        plain(HOSTILE, 150)["text"]
    )


def webhook_body() -> str:
    job = replace(make_job(), reason=HOSTILE)
    event = Event(job_id=job.id, seq=1, at=START, kind="attempt.ended", message=HOSTILE, data={HOSTILE: [HOSTILE]})
    document = json.loads(body(Delivery(stream=event.job_id, event=event), JobSnapshot(job=job, attempts=())))
    texts = [document["data"]["message"], document["data"]["job"]["reason"], *document["data"]["detail"]]
    return "".join(texts).replace("\n", " ")


@pytest.mark.parametrize("shown", [log_line, log_traceback, slack_texts, webhook_body])
def test_logs_and_messages_have_no_control_characters(shown: Callable[[], str]) -> None:
    assert clean(shown())


def _say(part: Any) -> Callable[[], None]:
    return lambda: Output(as_json=False).print(part)


def _table() -> Table:
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE.replace("\n", " "))
    table.add_row(Text(HOSTILE.replace("\n", " ")))
    return table


def _hostile_job() -> JobDetail:
    job = replace(make_job(), reason=HOSTILE, spec=make_job().spec.model_copy(update={"labels": {"team": HOSTILE}}))
    return job_detail(job, [make_attempt(job)])


def _live() -> None:
    with LiveDisplay(Output(as_json=False)) as display:
        display.event(hostile_event())
        display.note(HOSTILE)


def _csv() -> None:
    row = SpendRowView.model_validate(dict.fromkeys(SpendRowView.model_fields, 0) | {"key": "=1+1\x1b"})
    spending._csv(SpendView(by="team", zone="UTC", since=START, until=START, rows=(row,), total=row))


SINKS: dict[str, Callable[[], None]] = {
    "line": _say(HOSTILE),
    "text": _say(Text(HOSTILE.replace("\n", " "))),
    "table": lambda: Output(as_json=False).print(_table()),
    "terminal table": _say(TerminalTable([Column(name="why", prose=True), Column(name="x")], [(HOSTILE, HOSTILE)])),
    "job": lambda: Output(as_json=False).print(jobs.detail(_hostile_job())),
    "jobs": lambda: Output(as_json=False).print(job_table.table([_hostile_job()])),
    "progress": lambda: PlainDisplay(Output(as_json=False)).show(view(_hostile_job())),
    "event": lambda: PlainDisplay(Output(as_json=False)).event(hostile_event()),
    "live": _live,
    "json line": lambda: Output(as_json=True).line(hostile_event()),
    "json document": lambda: Output(as_json=True).document({"x": HOSTILE}),
    "error": lambda: Output(as_json=False).error(BadInput(HOSTILE)),
    "fit": lambda: fit.print_event(hostile_event()),
    "csv": _csv,
}


@pytest.mark.parametrize("sink", SINKS)
def test_the_command_line_prints_no_control_characters(sink: str, capsys: pytest.CaptureFixture[str]) -> None:
    SINKS[sink]()
    out, err = capsys.readouterr()
    assert out + err
    assert clean(out.replace("error: ", "") if sink != "error" else out)
    assert clean(err)
    if sink == "csv":
        assert next(csv.DictReader(io.StringIO(out)))["key"] == "'=1+1\\u001b"


def test_an_event_is_one_line() -> None:
    assert "\n" not in event_line(hostile_event())


def test_a_log_on_a_terminal_keeps_lines_and_colours_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "10%\r20%\r\n\x1b[31mred\x1b[0m\x1b]0;TITLE\x07\x1b[2J\x9b2J\tx\n"
    assert terminal_log(text) == ("10%\n20%\n\x1b[31mred\x1b[0m\\u001b]0;TITLE\\u0007\\u001b[2J\\u009b2J\tx\n\x1b[0m")
    Output(as_json=False).log(text)
    assert capsys.readouterr().out == text  # a pipe gets what the job wrote
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    Output(as_json=False).log(text)
    assert capsys.readouterr().out == terminal_log(text)


async def test_the_log_channel_writes_one_line(caplog: pytest.LogCaptureFixture) -> None:
    event = Event(job_id=make_job().id, seq=1, at=START, kind="attempt.ended", message=HOSTILE)
    with caplog.at_level(logging.INFO):
        await LogNotifier().deliver(None, Delivery(stream=event.job_id, event=event), None, None)  # type: ignore[arg-type]
    assert clean(RedactingFormatter("%(message)s").format(caplog.records[-1]))


# -------------------------------------------------------------------------------------------- nothing goes around them

STREAMS = {
    "cli/__init__.py": "an error of the operating system",
    "cli/core/output.py": "the sink",
    "cli/jobs/ssh.py": "the bytes of a program on a machine, as ssh",
    "cli/commands/spending.py": "csv_cell",
    "cli/jobs/logs.py": "visible",
    "client/fit.py": "visible",
    "daemon/healthcheck.py": "visible",
    "daemon/log_setup.py": "the handler",
    "preflight/parse_worker.py": "the pipe to the daemon",
    "runtime/spot_plan_process.py": "the pipe to the daemon",
}
"""Modules that write to a stream themselves, and why that is safe."""


def _writes(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "Console"):
            return True
        if isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr") and ast.unparse(node.value) == "sys":
            return True
    return False


def test_no_module_prints_around_the_sinks() -> None:
    folder = Path(broker.__file__).parent
    sources = [path for path in folder.rglob("*.py") if "_pb2" not in path.name]
    writing = {path.relative_to(folder).as_posix() for path in sources if _writes(ast.parse(path.read_text()))}
    assert writing == set(STREAMS)

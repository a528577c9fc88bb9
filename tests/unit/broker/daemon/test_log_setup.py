"""Secrets never reach a log line."""

import logging

import pytest

from broker.daemon.log_setup import RedactingFormatter, redact


@pytest.mark.parametrize(
    "line",
    [
        "GET with gb_abc123_hush-hush_9",
        "Authorization: Bearer hush-hush",
        "connect postgresql://me:hush-hush@db.example/x failed",
        "options {'aws_secret_access_key': 'hush-hush', 'region': 'eu'}",
        "HF_TOKEN=hush-hush",
        "api_key: hush-hush",
    ],
)
def test_secrets_are_redacted(line: str) -> None:
    assert "hush" not in redact(line)
    assert "[redacted]" in redact(line)


def test_plain_lines_stay_as_they_are() -> None:
    line = "2026-01-01 INFO gpubroker.access: GET /v1/jobs/aaaaaaaaaaaaa 200 1.5 ms; tokens_per_s 12.5 at http://h:70/x"
    assert redact(line) == line


def test_tracebacks_are_redacted_too() -> None:
    try:
        raise ValueError("cannot use Bearer hush-hush")
    except ValueError as e:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "failed", None, (type(e), e, e.__traceback__))
    assert "hush" not in RedactingFormatter("%(message)s").format(record)

"""The steps of a run from its journal, and their reduction."""

import json

from broker.reporting.metrics_series import MAX_ATTEMPT, MAX_LINES, MAX_STEP, downsampled, metric_points


def journal(*rows: object) -> bytes:
    return "\n".join(json.dumps(row) for row in rows).encode()


def test_the_last_line_of_a_step_counts_and_bad_lines_are_left_out() -> None:
    raw = journal(
        {"step": 1, "loss": 4.0, "lr": 1e-4, "tokens": 100, "seconds": 0.5, "time": 10.0, "attempt": 1},
        {"step": 2, "loss": 3.0, "attempt": 1},
        {"step": 2, "loss": 2.5, "attempt": 2},
        {"loss": 1.0},
        ["no row"],
    )
    first, second = metric_points(raw + b"\n{broken\n\xff\n")
    assert (first.step, first.loss, first.lr, first.tokens_per_s, first.time) == (1, 4.0, 1e-4, 200.0, 10.0)
    assert (second.step, second.attempt, second.loss, second.tokens_per_s) == (2, 2, 2.5, None)
    assert metric_points(raw, after=1) == [second]
    assert metric_points(b"[" * 100_000 + b"\n" + raw, after=1) == [second]


def test_a_journal_of_short_lines_is_read_at_its_end() -> None:
    last = journal({"step": 7})
    assert [p.step for p in metric_points(journal({"step": 1}) + b"\n" * MAX_LINES + last)] == [7]


def test_values_that_are_no_finite_numbers_are_none() -> None:
    raw = b'{"step": 1, "loss": NaN, "lr": true, "time": "now", "tokens": 5, "seconds": 0, "attempt": "x"}'
    (point,) = metric_points(raw + b"\n" + b'{"step": 1e999}')
    assert point[1:] == (0, None, None, None, None)
    (huge,) = metric_points(b'{"step": 1, "loss": 1' + b"0" * 400 + b"}")
    assert huge.loss is None


def test_numbers_outside_the_range_of_the_wire_are_left_out() -> None:
    raw = journal({"step": MAX_STEP, "attempt": MAX_ATTEMPT + 1}, {"step": MAX_STEP + 1}, {"step": -1})
    assert [point[:2] for point in metric_points(raw)] == [(MAX_STEP, 0)]
    raw = journal({"step": 1, "attempt": MAX_ATTEMPT}, {"step": 2, "attempt": -1, "tokens": 1e308, "seconds": 1e-308})
    assert [(p.attempt, p.tokens_per_s) for p in metric_points(raw)] == [(MAX_ATTEMPT, None), (0, None)]


def test_a_reduction_keeps_the_end_and_means_the_rest() -> None:
    points = metric_points(journal(*({"step": n, "loss": float(n) if n > 2 else None} for n in range(1, 11))))
    assert downsampled(points, 10) == points
    reduced = downsampled(points, 5)
    assert [p.step for p in reduced] == [2, 4, 6, 8, 10]
    assert [p.loss for p in reduced] == [None, 3.5, 5.5, 7.5, 9.5]

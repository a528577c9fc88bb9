"""Emulated terminal of the README's pictures: the final screen of a redrawn display, and its SVG."""

from rich.text import Text

from examples import pictures

FIRST = "\x1b[?25l10:00  job.submitted\r\n\x1b[1mattempt 1\x1b[0m\r\nstep 1/4"
REDRAWN = (
    "\r\x1b[2K\x1b[1A\x1b[2K10:01  attempt.preempted\r\n\x1b[1mattempt 2 training\x1b[0m\r\n3/4 loss 2.0 · 5 s left"
)


def test_the_screen_shows_the_last_frame_below_the_events() -> None:
    screen = pictures.Screen()
    screen.feed(FIRST)
    screen.feed(REDRAWN)
    assert screen.text.plain.splitlines() == [
        "10:00  job.submitted", "10:01  attempt.preempted", "attempt 2 training", "3/4 loss 2.0 · 5 s left",
    ]  # fmt: skip
    assert [str(span.style) for span in screen.text.spans] == ["bold"]


def test_a_picture_is_taken_after_half_of_the_second_attempt() -> None:
    screen = pictures.Screen()
    screen.feed(FIRST)
    assert not pictures.resumed(screen.text.plain)
    screen.feed(REDRAWN)
    assert pictures.resumed(screen.text.plain)


def test_the_svg_loads_nothing_from_elsewhere() -> None:
    drawn = pictures.svg(Text("$0.50 of $2.00"), title="gpubroker watch last")
    assert "@font-face" not in drawn
    assert "url(http" not in drawn
    assert "gpubroker&#160;watch" in drawn or "gpubroker watch" in drawn

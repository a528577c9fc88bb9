"""Plots in the terminal, and the loss curve as a PNG if matplotlib is installed (extra `plots`)."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from broker.notify.plot import png
from broker.reporting.loss_curve import Losses


def in_terminal(losses: Losses, *, colour: bool) -> str:
    """Return the loss curve as a plot of 80 x 15 characters."""
    from plotext import figure

    finite = [(step, loss) for step, loss in losses if isfinite(loss)]  # any other number ends the process in plotext
    figure.clear()
    figure.plot_size(80, 15)
    figure.theme("simple")  # the terminal's own colours for all but the curve
    curve = figure.signal([step for step, _ in finite], [loss for _, loss in finite], marker="braille")
    figure.draw(curve.lines())
    figure.title("loss by optimizer step")
    return str(figure.build().string(colorless=not colour)).rstrip("\n")


def prices_in_terminal(lines: Sequence[tuple[str, Sequence[tuple[float, float]]]], *, colour: bool) -> str:
    """Return prices over time as a plot of 80 x 15 characters. `lines`: (label, (days, dollars an hour))."""
    from plotext import figure

    figure.clear()
    figure.plot_size(80, 15)
    figure.theme("simple")
    for label, line in lines:
        curve = figure.signal([at for at, _ in line], [usd for _, usd in line], marker="braille")
        figure.draw(curve.label(label).lines())
    figure.title("lowest $/h of a machine by days before now")
    return str(figure.build().string(colorless=not colour)).rstrip("\n")


def to_png(losses: Losses, heldout: tuple[float | None, float | None], resumed: tuple[int, ...], path: Path) -> bool:
    """Write the loss curve to `path` (see `notify.plot.png`). Return False when matplotlib is not installed."""
    picture = png(losses, heldout, resumed)
    if picture is None:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture)
    return True

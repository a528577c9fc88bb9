"""The loss curve: in the terminal, and as a PNG if matplotlib is installed (extra `plots`)."""

from pathlib import Path

from broker.notify.plot import png
from broker.reporting.loss_curve import Losses


def in_terminal(losses: Losses, *, colour: bool) -> str:
    """Return the loss curve as a plot of 80 x 15 characters."""
    import plotext

    plotext.clear_figure()
    plotext.plotsize(80, 15)
    plotext.theme("pro" if colour else "clear")
    plotext.plot([step for step, _ in losses], [loss for _, loss in losses], marker="braille")
    plotext.title("loss by optimizer step")
    return str(plotext.build())


def to_png(losses: Losses, heldout: tuple[float | None, float | None], resumed: tuple[int, ...], path: Path) -> bool:
    """Write the loss curve to `path` (see `notify.plot.png`). Return False when matplotlib is not installed."""
    picture = png(losses, heldout, resumed)
    if picture is None:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture)
    return True

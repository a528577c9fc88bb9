"""The loss curve: in the terminal, and as a PNG where matplotlib is installed (extra `plots`)."""

from pathlib import Path

Losses = tuple[tuple[int, float], ...]


def in_terminal(losses: Losses, *, colour: bool) -> str:
    """Characters of an 80 x 15 plot."""
    import plotext

    plotext.clear_figure()
    plotext.plotsize(80, 15)
    plotext.theme("pro" if colour else "clear")
    plotext.plot([step for step, _ in losses], [loss for _, loss in losses], marker="braille")
    plotext.title("loss by optimizer step")
    return str(plotext.build())


def to_png(losses: Losses, heldout: tuple[float | None, float | None], resumed: tuple[int, ...], path: Path) -> bool:
    """`resumed`: the steps that a later attempt continued from.

    False when matplotlib is not installed: `pip install 'gpubroker[plots]'`.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [step for step, _ in losses]
    axes.plot(steps, [loss for _, loss in losses], label="training, by step")
    before, after = heldout
    if before is not None and after is not None:
        axes.plot([0, steps[-1]], [before, after], "o--", label="held out, before and after")
    for number, step in enumerate(resumed):
        axes.axvline(step, color="grey", linestyle=":", label=None if number else "preempted, resumed from here")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats a token)")
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True

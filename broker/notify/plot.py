"""The loss curve as a PNG, where matplotlib is installed (extra `plots`)."""

from io import BytesIO

from broker.decide.curve import Losses


def png(losses: Losses, heldout: tuple[float | None, float | None], resumed: tuple[int, ...]) -> bytes | None:
    """`heldout`: before and after; `resumed`: the steps that a later attempt continued from.

    None when matplotlib is not installed: `pip install 'gpubroker[plots]'`.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
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
    picture = BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    return picture.getvalue()

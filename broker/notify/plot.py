"""Loss curve, scaling table and simulation as pictures, if matplotlib is installed (extra `plots`)."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from broker.reporting.loss_curve import Losses


def png(losses: Losses, heldout: tuple[float | None, float | None], resumed: tuple[int, ...]) -> bytes | None:
    """Return the loss curve as PNG, or None if matplotlib is not installed.

    `heldout`: loss before and after; `resumed`: steps from which later attempts resumed. Install with `pip install
    'gpubroker[plots]'`.
    """
    figure = _figure()
    if figure is None:
        return None
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
    return _saved(figure)


def scaling_png(table: dict[str, Any]) -> bytes | None:
    """Return throughput with its interval, and utilisation, over the number of GPUs as PNG.

    `table`: the result of `broker.sizing.what_if.table`. Return None if matplotlib is not installed, or if no number of
    GPUs fits.
    """
    rows, figure = [row for row in table["points"] if row["plan"]], _figure()
    if figure is None or not rows:
        return None
    rate, share = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    gpus = [row["gpus"] for row in rows]
    rate.plot(gpus, [row["tokens_per_s"] for row in rows], "o-", label="estimated")
    low, high = zip(*(row["tokens_per_s_interval"] for row in rows), strict=True)
    rate.fill_between(gpus, low, high, alpha=0.2, label="interval")
    first = rows[0]["tokens_per_s"] / gpus[0]
    rate.plot(gpus, [first * n for n in gpus], ":", color="grey", label="linear")
    rate.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="tokens/s of all")
    rate.legend()
    share.plot(gpus, [100 * row["mfu"] for row in rows], "o-")
    share.set(xscale="log", ylim=(0, None), xlabel="GPUs", ylabel="model FLOP utilisation, %")
    for axes in (rate, share):
        axes.set_xticks(gpus, [str(n) for n in gpus], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.suptitle(f"{table['model']}, {table['method']}, {table['gpu']}, global batch {table['global_batch']}")
    return _saved(figure)


Hours = Sequence[tuple[float, float]]
"""Times from and to, in hours."""
COLOURS = {"spot": "tab:green", "on-demand": "tab:red", "none": "tab:grey"}


def timeline_picture(zones: Mapping[str, Hours], machines: Mapping[str, Hours], title: str, kind: str) -> bytes | None:
    """Return a picture of the times at which each zone sold spot, and of the job's machines over time.

    `kind`: png or svg. Return None if matplotlib is not installed.
    """
    figure = _figure()
    if figure is None:
        return None
    axes, names = figure.add_subplot(), ["job", *zones]
    for row, times in enumerate(zones.values(), 1):
        axes.broken_barh([(a, b - a) for a, b in times], (row - 0.3, 0.6), color="tab:blue", alpha=0.4)
    for machine, times in machines.items():
        label = {"none": "waits"}.get(machine, f"job {machine}")
        axes.broken_barh([(a, b - a) for a, b in times], (-0.4, 0.8), color=COLOURS[machine], label=label)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="hours", title=title)
    axes.legend(loc="upper right")
    return _saved(figure, kind)


def _figure() -> Any:
    """Return an empty figure, or None if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _saved(figure: Any, kind: str = "png") -> bytes:
    picture = BytesIO()
    figure.savefig(picture, dpi=120, format=kind)
    return picture.getvalue()

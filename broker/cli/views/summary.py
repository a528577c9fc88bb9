"""The summary of a job on the terminal."""

from rich.table import Table
from rich.text import Text

from broker.cli.core import formatting
from broker.cli.core.output import Output
from broker.cli.core.plots import in_terminal
from broker.cli.views.summary_data import AttemptLine, Sample, Summary


def show(out: Output, summary: Summary) -> None:
    """Print attempts, steps and cost, the loss curve, held-out loss, samples and the location of the files."""
    if summary.attempts:
        out.print(_attempts(summary.attempts))
    if len(summary.losses) > 1:
        out.print(Text.from_ansi(in_terminal(summary.losses, colour=out.live)))
    for sample in summary.samples:
        out.print(_sample(sample))
    for line in lines(summary):
        out.print(line)


def lines(summary: Summary) -> list[str]:
    """Return the facts of the summary, one per line."""
    facts = [f"{summary.name} ({summary.job}) {summary.state}" + (f": {summary.reason}" if summary.reason else "")]
    count = len(summary.attempts)
    attempts = f"{count} attempt{'' if count == 1 else 's'}, {summary.preemptions} preempted"
    steps = f"; {summary.steps} steps, {summary.steps_redone} of them lost and redone" if summary.steps else ""
    facts.append(f"{attempts}{steps}; {formatting.duration(summary.seconds)}")
    facts.append(_money(summary))
    before, after = summary.heldout_loss_before, summary.heldout_loss_after
    if before is not None and after is not None:
        facts.append(f"held-out loss {before:.3f} -> {after:.3f}")
    if summary.adapter:
        facts.append(f"adapter: {summary.adapter}")
        if summary.picture:
            facts.append(f"loss curve: {summary.picture}")
    elif summary.steps:
        facts.append(f"files: `gpubroker artifacts {summary.job} --to DIR`")
    return facts


def _money(summary: Summary) -> str:
    text = f"{formatting.money(summary.usd)} spent of {formatting.money(summary.cap_usd)}"
    if summary.usd_on_demand:
        saved = 1 - summary.usd_compared / summary.usd_on_demand
        lost_cost = f", {formatting.money(summary.usd_lost)} for lost work included" if summary.usd_lost else ""
        text += f"; the useful time on demand: {formatting.money(summary.usd_on_demand)} ({saved:.0%} saved{lost_cost})"
    return text


def _attempts(attempts: tuple[AttemptLine, ...]) -> Table:
    table = Table(title="Attempts", title_justify="left")
    table.add_column("#", justify="right")
    table.add_column("machine")
    table.add_column("steps", justify="right")
    table.add_column("time", justify="right")
    table.add_column("ended")
    table.add_column("$", justify="right")
    for a in attempts:
        steps = "–" if a.start_step is None else f"{a.start_step} → {a.end_step}"
        table.add_row(str(a.number), a.machine, steps, formatting.duration(a.seconds), a.why, formatting.money(a.usd))
    table.add_section()
    table.add_row(
        "", "all", "", "", "", formatting.money(sum((a.usd for a in attempts), start=type(attempts[0].usd)(0)))
    )
    return table


def _sample(sample: Sample) -> Table:
    table = Table(title=Text(sample.prompt), title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("base", Text(sample.base))
    table.add_row("tuned", Text(sample.tuned))
    return table

"""Policies that the broker is compared with: on-demand only, greedy spot, and Uniform Progress.

In several zones each takes the cheapest spot machine on sale, and on-demand in the cheapest zone.
"""

from broker.simulation.runs import SimulatedMachine, SimulatedRun


def on_demand(run: SimulatedRun) -> SimulatedMachine | None:
    """Return on-demand in every tick."""
    return SimulatedMachine("on-demand", run.cheapest)


def greedy(run: SimulatedRun) -> SimulatedMachine | None:
    """Return spot whenever it is available, nothing while waiting is safe, and otherwise on-demand until the end."""
    if run.machine is not None:
        return run.machine
    zone = run.spot_zone()
    if zone is not None and run.may_try_spot():
        return SimulatedMachine("spot", zone)
    return None if run.may_wait() else on_demand(run)


def uniform_progress(run: SimulatedRun) -> SimulatedMachine | None:
    """Return the choice of Uniform Progress with hysteresis, section 5.3 of "Can't Be Late" (NSDI 2024)."""
    if run.machine is not None and run.on_spot:
        return run.machine
    rate, now_s = run.work_s / (run.ticks * run.tick_s), run.tick * run.tick_s
    zone = run.spot_zone() if run.may_try_spot() else None
    if run.machine is not None:
        is_behind = run.done_s < (now_s + 2 * run.changeover_s) * rate
        return run.machine if zone is None or is_behind else SimulatedMachine("spot", zone)
    if zone is not None:
        return SimulatedMachine("spot", zone)
    return on_demand(run) if run.done_s < now_s * rate or not run.may_wait() else None

"""Configuration of the simulated market."""

from typing import Annotated, Literal

from pydantic import Field

from trainer.contract.base import Config

Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0, le=31_536_000)]


class Faults(Config):
    """How the simulated cloud misbehaves. Shares are of calls, drawn from the seed."""

    list_lag_s: Seconds = 0.0
    """Longest time for which listings miss a new machine, or still show a destroyed one."""
    throttled: Share = 0.0
    """429: nothing was done."""
    server_error: Share = 0.0
    """5xx: nothing was done, but the caller cannot know."""
    no_capacity: Share = 0.0
    """Creates that find the offer sold out."""
    lost_reply: Share = 0.0
    """Creates that happen, but whose caller is told of a time-out."""
    lying_timeout: Share = 0.0
    """Creates that time out and happen afterwards."""
    lying_delay_s: Seconds = 5.0
    """How long afterwards."""
    wrong_machine: Share = 0.0
    """Creates that deliver another GPU than the one that was bought."""


class VirtualConfig(Config):
    """Machines that are only simulated: `simulated.body: virtual`."""

    run_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds of training that a whole job takes."""
    steps: Annotated[int, Field(ge=1)] = 100
    """Optimizer steps that are pretended to fill `run_s`."""
    boot_s: Seconds = 1.0
    """From create to the first beat."""
    beat_s: Annotated[float, Field(gt=0)] = 5.0
    """Between beats, and between looks at what is desired."""
    tick_s: Annotated[float, Field(gt=0)] = 0.1
    """Shortest time between two rounds over what is due."""
    tokens_per_s: Annotated[float, Field(gt=0)] = 1000.0


class SimulatedConfig(Config):
    """A seeded market of several clouds. Nothing is bought: prices are of plausible size, not current ones."""

    body: Literal["real", "virtual"] = "real"
    """`real`: processes of this machine that are preempted by SIGKILL; `virtual`: none, for simulation."""
    seed: int = 0
    price_bucket_s: Annotated[float, Field(gt=0)] = 60.0
    """Prices stand still for so long."""
    price_period_s: Annotated[float, Field(gt=0)] = 3600.0
    """Time over which a price wanders from one level to the next."""
    sold_out: Share = 0.05
    """Share of (offer, bucket) pairs that are shown as sold out."""
    capacity: Annotated[int, Field(ge=1)] = 100_000
    """Machines of one offer that can live at once."""
    hazard_scale: Annotated[float, Field(ge=0)] = 1.0
    """Multiplies every offer's preemptions per hour."""
    lifetimes_s: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Script of the lifetimes of successive spot machines; those after them are drawn from the hazard."""
    notice_s: Seconds = 0.0
    """Warning before a preemption; 0: none."""
    boot_s: Seconds = 10.0
    """Typical time to the first beat, for estimates of the real body."""
    faults: Faults = Faults()
    virtual: VirtualConfig = VirtualConfig()

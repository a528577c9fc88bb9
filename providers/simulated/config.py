"""Configuration of the simulated market."""

from typing import Annotated, Literal

from pydantic import Field

from trainer.contract.base import Config

Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0, le=31_536_000)]


class Faults(Config):
    """Faults of the simulated cloud. Shares are shares of calls, drawn from the seed."""

    list_lag_s: Seconds = 0.0
    """Longest time for which listings miss a new machine, or still show a destroyed one."""
    throttled: Share = 0.0
    """Share of calls that fail with 429 and have no effect."""
    server_error: Share = 0.0
    """Share of calls that fail with 5xx and have no effect, which the caller cannot know."""
    no_capacity: Share = 0.0
    """Share of creates that fail because the offer is sold out."""
    lost_reply: Share = 0.0
    """Share of creates that succeed although the caller gets a time-out."""
    lying_timeout: Share = 0.0
    """Share of creates that time out and succeed afterwards."""
    lying_delay_s: Seconds = 5.0
    """Time from such a time-out to the creation."""
    wrong_machine: Share = 0.0
    """Share of creates that deliver a GPU other than the purchased one."""


class VirtualConfig(Config):
    """Machines that exist in memory only: `simulated.body: virtual`."""

    run_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds of training that a whole job takes."""
    steps: Annotated[int, Field(ge=1)] = 100
    """Simulated optimizer steps in `run_s`."""
    boot_s: Seconds = 1.0
    """Seconds from the create to the first heartbeat."""
    beat_s: Annotated[float, Field(gt=0)] = 5.0
    """Seconds between heartbeats, and between polls of desired.json."""
    tick_s: Annotated[float, Field(gt=0)] = 0.1
    """Shortest time in seconds between two rounds over due machines."""
    tokens_per_s: Annotated[float, Field(gt=0)] = 1000.0
    """Simulated training speed."""


class SimulatedConfig(Config):
    """A seeded market of several clouds. Nothing is bought, and prices are plausible but not current."""

    body: Literal["real", "virtual"] = "real"
    """real: machines are processes of this host, preempted by SIGKILL; virtual: machines in memory, for simulation."""
    trusted: bool = False
    """true: real machines run the jobs of every user as the daemon's user; false: as providers.local
    allows."""
    seed: int = 0
    """Seed of prices, faults and lifetimes."""
    price_bucket_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds for which a price stays constant."""
    price_period_s: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds over which a price moves from one level to the next."""
    sold_out: Share = 0.05
    """Share of (offer, bucket) pairs that are listed as sold out."""
    capacity: Annotated[int, Field(ge=1)] = 100_000
    """Largest number of machines of one offer at a time."""
    hazard_scale: Annotated[float, Field(ge=0)] = 1.0
    """Factor applied to every offer's preemptions per hour."""
    lifetimes_s: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Lifetimes of the first spot machines, in order; later lifetimes are drawn from the hazard."""
    notice_s: Seconds = 0.0
    """Seconds of notice before a preemption; 0: no notice."""
    boot_s: Seconds = 10.0
    """Typical seconds to the first heartbeat of a real process, for estimates."""
    faults: Faults = Faults()
    virtual: VirtualConfig = VirtualConfig()

"""Every cloud that the broker knows. A new one is a file of its own, and here a field and a line."""

from pathlib import Path

from broker.domain.ids import Installation
from broker.ports import Blobs, Clock, Provider
from providers.body import Body
from providers.local import LocalConfig, LocalProvider
from providers.processes import RealBody
from providers.sim_config import SimulatedConfig
from providers.sim_virtual import VirtualBody
from providers.simulated import SimulatedProvider
from trainer.contract.base import Config


class ProvidersConfig(Config):
    """Which clouds are used: a section that is absent is off."""

    local: LocalConfig | None = LocalConfig()
    simulated: SimulatedConfig | None = None


def build(
    config: ProvidersConfig, *, installation: Installation, state: Path, clock: Clock, blobs: Blobs
) -> dict[str, Provider]:
    """The configured providers by name. Each keeps what it must remember in `<state>/<name>/`."""
    found: dict[str, Provider] = {}
    if config.local is not None:
        found["local"] = LocalProvider(config.local, installation=installation, state=state / "local", clock=clock)
    if config.simulated is not None:
        found["simulated"] = _simulated(config.simulated, installation, state / "simulated", clock, blobs)
    return found


def _simulated(
    config: SimulatedConfig, installation: Installation, state: Path, clock: Clock, blobs: Blobs
) -> SimulatedProvider:
    body: Body
    if config.body == "virtual":
        body = VirtualBody(blobs, clock, config.virtual, seed=config.seed)
    else:
        body = RealBody(state / "instances", provider="simulated", installation=installation)
    return SimulatedProvider(config, body, installation=installation, state=state, clock=clock)

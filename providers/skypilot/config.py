"""Settings of SkyPilot (`providers.sky`)."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from providers.skypilot.environment import find_python
from trainer.contract.base import Config


class SkyConfig(Config):
    """Settings of SkyPilot, which launches the rented machines."""

    url: str | None = None
    """URL of a team's SkyPilot API server (0.14.1, with gpubroker's plugin). Default: the daemon starts its own."""
    token: Annotated[str, Field(repr=False)] = ""
    """Token of the plugin on the server at `url` (its `GPUBROKER_SKY_TOKEN`)."""
    python: Path | None = None
    """Python of SkyPilot's environment. Default: the one that `gpubroker clouds install` made, then the image's."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Loopback port of the daemon's own server; 0 selects a free port."""
    warm: bool = False
    """true: start that server together with the daemon, for 0.5 GB of memory. false: start it at the first launch,
    which then takes about 10 s longer.
    """
    launches: Annotated[int, Field(ge=1)] = 4
    """Largest number of simultaneous launches; fewer while memory is short, since each takes about 0.4 GB."""
    launch_deadline_s: Annotated[float, Field(gt=0)] = 900.0
    """Seconds after which a launch is cancelled; machines that it left behind are found and destroyed."""
    env: dict[str, str] = Field(default_factory=dict, repr=False)
    """Additional environment variables for the daemon's own server, e.g. another endpoint of a cloud."""
    config: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Additional SkyPilot configuration for that server, e.g. `{"aws": {"use_internal_ips": true}}`."""

    def interpreter(self, providers: Path) -> Path:
        """Return the Python of SkyPilot's environment, which may be missing. `providers`: `<home>/providers`."""
        return find_python(self.python, providers)

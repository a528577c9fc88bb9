"""Every cloud that the broker knows. A new one is a file of its own, and here a field and a line."""

import importlib.util
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, model_validator

from broker.domain.errors import Rejected
from broker.domain.ids import Installation
from broker.ports import Blobs, Clock, Provider
from providers.aws.provider import AwsCloud, AwsConfig
from providers.common.account_guard import Account
from providers.common.cloud import Cloud, CloudProvider
from providers.common.credentials import digest_of, sky_env, sky_files
from providers.lambda_cloud.provider import LambdaCloud, LambdaConfig
from providers.local.machine import MachineBackend
from providers.local.process_backend import ProcessBackend
from providers.local.provider import LocalConfig, LocalProvider
from providers.runpod.provider import RunpodCloud, RunpodConfig
from providers.simulated.config import SimulatedConfig
from providers.simulated.provider import SimulatedProvider
from providers.simulated.virtual_backend import VirtualBackend
from providers.skypilot.launcher import SkyConfig, SkyLauncher
from providers.vast.provider import VastCloud, VastConfig
from trainer.contract.base import Config

CLOUDS: Mapping[str, tuple[Callable[..., Cloud], str]] = {
    "runpod": (RunpodCloud, "RUNPOD_API_BASE_URL"),
    "vast": (VastCloud, "VAST_URL"),
    "lambda": (LambdaCloud, "GPUBROKER_LAMBDA_ENDPOINT"),
    "aws": (AwsCloud, "AWS_ENDPOINT_URL"),
}
"""By name: the native half, and the variable by which SkyPilot's half is told of another endpoint."""


class ProvidersConfig(Config):
    """Which clouds are used: a section that is absent is off."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    local: LocalConfig | None = LocalConfig()
    """This machine."""
    simulated: SimulatedConfig | None = None
    """A seeded market without real money; see docs/design/providers.md."""
    runpod: RunpodConfig | None = None
    """RunPod; see docs/guide/clouds.md for this and the next three."""
    vast: VastConfig | None = None
    """Vast.ai."""
    lambda_: LambdaConfig | None = Field(default=None, alias="lambda")
    """Lambda."""
    aws: AwsConfig | None = None
    """Amazon EC2."""
    sky: SkyConfig = SkyConfig()
    """How rented machines are launched, whichever cloud they are of."""

    @model_validator(mode="after")
    def _skypilot_is_there(self) -> "ProvidersConfig":
        for cloud in self.rented():
            if importlib.util.find_spec("sky") is None:
                raise ValueError(f"{cloud} is bought through SkyPilot: pip install 'gpubroker[clouds]', or remove it")
        return self

    def rented(self) -> dict[str, Any]:
        """The configuration of each cloud that is switched on, by name."""
        sections = {"runpod": self.runpod, "vast": self.vast, "lambda": self.lambda_, "aws": self.aws}
        return {name: section for name, section in sections.items() if section is not None}


def build(
    config: ProvidersConfig,
    *,
    installation: Installation,
    state: Path,
    clock: Clock,
    blobs: Blobs,
    launches: bool = False,
) -> dict[str, Provider]:
    """The configured providers by name. Each keeps what it must remember in `<state>/<name>/`.

    `launches`: whether they will be asked for machines, so that what this takes may be made ready; needs a loop.
    """
    found: dict[str, Provider] = {}
    if config.local is not None:
        found["local"] = LocalProvider(config.local, installation=installation, state=state / "local", clock=clock)
    if config.simulated is not None:
        found["simulated"] = _simulated(config.simulated, installation, state / "simulated", clock, blobs)
    rented = config.rented()
    if not rented:
        return found
    accounts = {name: _account(name, section, installation, state, clock) for name, section in rented.items()}
    launcher = _launcher(config.sky, rented, accounts, installation, state / "sky")
    if launches:
        launcher.warm_up()
    for name, section in rented.items():
        cloud, account = accounts[name]
        found[name] = CloudProvider(cloud, launcher, account, installation=installation, emulated=section.emulated)
    return found


def _account(name: str, section: Any, installation: Installation, state: Path, clock: Clock) -> tuple[Cloud, Account]:
    make, _ = CLOUDS[name]
    cloud = make(section, installation=installation, clock=clock, env=os.environ, home=Path.home())
    return cloud, Account(cloud, state / name / "account.json")


def _launcher(
    config: SkyConfig, rented: Mapping[str, Any], accounts: Mapping[str, tuple[Cloud, Account]],
    installation: Installation, state: Path,
) -> SkyLauncher:  # fmt: skip
    """One API server for all clouds, with their credentials and endpoints."""
    env = sky_env(rented, os.environ, Path.home())
    env |= {CLOUDS[name][1]: section.endpoint for name, section in rented.items() if section.endpoint}

    def keys() -> Mapping[str, Mapping[str, bytes]]:
        """Those of the account that we list: SkyPilot must not buy where nobody looks."""
        read = {}
        for name, (_, account) in accounts.items():
            with suppress(Rejected):
                files = sky_files(name, os.environ, Path.home())
                if account.owns(digest_of(files)):
                    read[name] = files
        return read

    return SkyLauncher(config, installation=installation, state=state, keys=keys, env=env)


def _simulated(
    config: SimulatedConfig, installation: Installation, state: Path, clock: Clock, blobs: Blobs
) -> SimulatedProvider:
    body: MachineBackend
    if config.body == "virtual":
        body = VirtualBackend(blobs, clock, config.virtual, seed=config.seed)
    else:
        body = ProcessBackend(state / "instances", provider="simulated", installation=installation)
    return SimulatedProvider(config, body, installation=installation, state=state, clock=clock)

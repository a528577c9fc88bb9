"""Registry of all providers and their configuration.

A new cloud needs a package below `providers`, a field of `ProvidersConfig` and a row of `CLOUD_CLASSES`.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from broker.domain.errors import InvalidInput, Problem, Rejected
from broker.domain.ids import Installation
from broker.ports import Blobs, Clock, Provider
from providers.aws.provider import AwsCloud, AwsConfig
from providers.common.account_guard import Account
from providers.common.cloud import Cloud, CloudProvider
from providers.common.credentials import digest_of, sky_env, sky_files
from providers.lambda_cloud.provider import LambdaCloud, LambdaConfig
from providers.local.isolation import HostSandbox
from providers.local.machine import MachineBackend
from providers.local.process_backend import ProcessBackend
from providers.local.provider import LocalConfig, LocalProvider
from providers.runpod.provider import RunpodCloud, RunpodConfig
from providers.simulated.config import SimulatedConfig
from providers.simulated.provider import SimulatedProvider
from providers.simulated.virtual_backend import VirtualBackend
from providers.skypilot.config import SkyConfig
from providers.skypilot.environment import problem
from providers.skypilot.launcher import SkyLauncher
from providers.skypilot.plugin.call_turns import FOLDER_VARIABLE, slots_folder
from providers.vast.provider import VastCloud, VastConfig
from trainer.contract.base import Config

CLOUD_CLASSES: Mapping[str, tuple[Callable[..., Cloud], str]] = {
    "runpod": (RunpodCloud, "RUNPOD_API_BASE_URL"),
    "vast": (VastCloud, "VAST_URL"),
    "lambda": (LambdaCloud, "GPUBROKER_LAMBDA_ENDPOINT"),
    "aws": (AwsCloud, "AWS_ENDPOINT_URL"),
}
"""Cloud class by name, and the environment variable that sets another endpoint in SkyPilot's server."""


class ProvidersConfig(Config):
    """Settings of the clouds. A cloud without a section is not used."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    local: LocalConfig | None = LocalConfig()
    """Machines on this host."""
    simulated: SimulatedConfig | None = None
    """Simulated market without real money; see docs/design/providers.md."""
    runpod: RunpodConfig | None = None
    """RunPod; see docs/guide/clouds.md for this section and the next three."""
    vast: VastConfig | None = None
    """Vast.ai."""
    lambda_: LambdaConfig | None = Field(default=None, alias="lambda")
    """Lambda."""
    aws: AwsConfig | None = None
    """Amazon EC2."""
    sky: SkyConfig = SkyConfig()
    """Settings of SkyPilot, which launches the machines of all rented clouds."""

    def rented(self) -> dict[str, Any]:
        """Return the configuration of each rented cloud that is used, by name."""
        sections = {"runpod": self.runpod, "vast": self.vast, "lambda": self.lambda_, "aws": self.aws}
        return {name: section for name, section in sections.items() if section is not None}


def check_skypilot(config: ProvidersConfig, state: Path) -> None:
    """Check that machines of the rented clouds can be launched. Raises InvalidInput.

    `state`: as for `build`. A team's server (`providers.sky.url`) has an environment of its own.
    """
    if config.rented() and config.sky.url is None:
        missing = problem(config.sky.interpreter(state))
        if missing is not None:
            clouds = ", ".join(config.rented())
            raise InvalidInput(Problem(field="providers", message=f"{clouds}: {missing}, or remove the section"))


def build(
    config: ProvidersConfig,
    *,
    installation: Installation,
    state: Path,
    clock: Clock,
    blobs: Blobs,
    launches: bool = False,
    sandbox: HostSandbox | None = None,
) -> dict[str, Provider]:
    """Return the configured providers by name. Each stores its state in `<state>/<name>/`.

    `launches`: True starts SkyPilot's server in the background if so configured; needs a running event loop.
    `sandbox`: builder of isolated machines on this host; None: they are rejected.
    """
    providers: dict[str, Provider] = {}
    if config.local is not None:
        providers["local"] = LocalProvider(
            config.local, installation=installation, state=state / "local", clock=clock, sandbox=sandbox,
            beside_rented=bool(config.rented()),
        )  # fmt: skip
    if config.simulated is not None:
        backend = _simulated_machines(config.simulated, installation, state / "simulated", clock, blobs, sandbox)
        providers["simulated"] = SimulatedProvider(
            config.simulated, backend, installation=installation, state=state / "simulated", clock=clock
        )
    rented = config.rented()
    if not rented:
        return providers
    accounts = {name: _account(name, section, installation, state, clock) for name, section in rented.items()}
    launcher = _launcher(config.sky, rented, accounts, installation, state / "sky")
    if launches:
        launcher.warm_up()
    for name, section in rented.items():
        cloud, account = accounts[name]
        providers[name] = CloudProvider(cloud, launcher, account, installation=installation, emulated=section.emulated)
    return providers


def _account(name: str, section: Any, installation: Installation, state: Path, clock: Clock) -> tuple[Cloud, Account]:
    make, _ = CLOUD_CLASSES[name]
    cloud = make(section, installation=installation, clock=clock, env=os.environ, home=Path.home())
    return cloud, Account(cloud, state / name / "account.json")


def _launcher(
    config: SkyConfig, rented: Mapping[str, Any], accounts: Mapping[str, tuple[Cloud, Account]],
    installation: Installation, state: Path,
) -> SkyLauncher:  # fmt: skip
    """Return the launcher. It has one SkyPilot API server with the credentials and endpoints of all clouds."""
    env = sky_env(rented, os.environ, Path.home())
    env |= {FOLDER_VARIABLE: str(slots_folder(Path.home()))}
    env |= {CLOUD_CLASSES[name][1]: section.endpoint for name, section in rented.items() if section.endpoint}

    def keys() -> Mapping[str, Mapping[str, bytes]]:
        """Return the credential files by cloud.

        A cloud is left out unless its files belong to the account that the broker lists. Otherwise SkyPilot would buy
        machines that the broker cannot list.
        """
        files_by_cloud = {}
        for name, (_, account) in accounts.items():
            with suppress(Rejected):
                files = sky_files(name, os.environ, Path.home())
                if account.owns(digest_of(files)):
                    files_by_cloud[name] = files
        return files_by_cloud

    return SkyLauncher(config, installation=installation, state=state, keys=keys, env=env)


def _simulated_machines(
    config: SimulatedConfig, installation: Installation, state: Path, clock: Clock, blobs: Blobs,
    sandbox: HostSandbox | None,
) -> MachineBackend:  # fmt: skip
    if config.body == "virtual":
        return VirtualBackend(blobs, clock, config.virtual, seed=config.seed)
    return ProcessBackend(state / "instances", provider="simulated", installation=installation, sandbox=sandbox)

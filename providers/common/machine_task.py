"""What SkyPilot runs on a rented machine: the trainer, and no word of the user's."""

from dataclasses import dataclass, field
from importlib.resources import files

from broker.domain.instance import BootSpec, TrainerBundle, TrainerImage

STOCK_IMAGE = "docker.io/pytorch/pytorch@sha256:6acf597eeb8e376a96580dde4952f37cc017fef732bb40bfc73f28f25e3f64b4"
"""What a machine is made of when the operator has no image: the trainer's torch, and the oldest CUDA built for it.

Its tag is 2.13.0-cuda12.6-cudnn9-runtime (Python 3.12). Any driver that runs CUDA 12 runs it (minor version
compatibility); a B200 needs an image of CUDA 12.8 or newer.
"""
HUB = "docker.io"


@dataclass(frozen=True, kw_only=True)
class MachineTask:
    """`setup` and `run` are texts of ours alone; what varies travels in the environment."""

    setup: str
    """Run once on every node before `run`, which does not start where it fails. SkyPilot counts it to the job."""
    run: str
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    """Environment of both that SkyPilot redacts."""
    image: str | None = None
    """What the machine is made of where the cloud takes images (`docker:…@sha256:…`)."""
    registry_login: tuple[str, str, str] | None = field(default=None, repr=False)
    """(server, user name, password) of a private registry."""
    nodes: int = 1


def task_of(boot: BootSpec, *, docker_run: bool) -> MachineTask:
    """The task of one attempt. `docker_run`: the machine is a plain one, and the image is run on it.

    Raises ValueError for a boot without a trainer: every rented machine must be given one.
    """
    env, secrets, image, login = dict(boot.env), dict(boot.secret_env), None, None
    match boot.trainer:
        case TrainerImage() as given:
            env |= {"GPUBROKER_WAY": "docker" if docker_run else "image", "GPUBROKER_IMAGE": given.reference}
            if not docker_run:
                image = given.reference
            if given.username and docker_run:
                env |= {"GPUBROKER_REGISTRY_USERNAME": given.username}
                env |= {"GPUBROKER_REGISTRY_SERVER": registry_of(given.reference)}
                secrets |= {"GPUBROKER_REGISTRY_PASSWORD": given.password}
            elif given.username:
                login = (registry_of(given.reference), given.username, given.password)
        case TrainerBundle() as bundle:
            env |= {"GPUBROKER_WAY": "bundle", "GPUBROKER_BUNDLE_SHA256": bundle.sha256}
            secrets |= {"GPUBROKER_BUNDLE_URL": bundle.url}
            image = None if docker_run else STOCK_IMAGE
        case None:
            raise ValueError("a rented machine is given no trainer: neither an image nor a bundle")
    return MachineTask(
        setup=_script("setup.sh"),
        run=_script("run.sh"),
        env=env,
        secrets=secrets,
        image=f"docker:{image}" if image else None,
        registry_login=login,
        nodes=boot.nodes,
    )


def registry_of(reference: str) -> str:
    """The server of an image reference; without a host it is Docker Hub's."""
    first, slash, _ = reference.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else HUB


def _script(name: str) -> str:
    return (files("providers") / "machine" / name).read_text("utf-8")

"""The task that SkyPilot runs on a rented machine: the trainer, without any text from the user."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from broker.domain.instance import BootSpec, TrainerBundle, TrainerImage

STOCK_IMAGE = "docker.io/pytorch/pytorch@sha256:6acf597eeb8e376a96580dde4952f37cc017fef732bb40bfc73f28f25e3f64b4"
"""Default image of a machine: the trainer's torch, with the oldest CUDA built for it.

The image's tag is 2.13.0-cuda12.6-cudnn9-runtime (Python 3.12). Any driver that runs CUDA 12 runs it (minor version
compatibility); a B200 needs an image of CUDA 12.8 or newer.
"""
STOCK_IMAGE_CUDA = "12.6"
"""CUDA for which the torch of `STOCK_IMAGE` is built, by the image's tag."""
CUDA_FLOOR = "12.4"
"""Oldest CUDA of a host's driver that is bought, in price queries and creates; the default of each `cuda_min`.

Minor version compatibility lets a driver of any CUDA 12 run `STOCK_IMAGE_CUDA` (docs.nvidia.com, "CUDA
Compatibility"). The margin above 12.0, which excludes drivers before branch R550, is assumed.
"""
HUB = "docker.io"


@dataclass(frozen=True, kw_only=True)
class MachineTask:
    """A task for SkyPilot. `setup` and `run` are fixed scripts; variable values travel in the environment."""

    setup: str
    """Script that runs once on every node before `run`, which starts only if it succeeds; part of SkyPilot's job."""
    run: str
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    """Environment of both scripts that SkyPilot redacts in its logs."""
    image: str | None = None
    """Image of the machine if the cloud accepts images (`docker:…@sha256:…`); None: the cloud's default."""
    registry_login: tuple[str, str, str] | None = field(default=None, repr=False)
    """(server, user name, password) of a private registry; None: no login."""
    nodes: int = 1


def task_of(boot: BootSpec, *, docker_run: bool) -> MachineTask:
    """Return the task of one attempt. `docker_run`: the machine has no image, and the task starts the image on it.

    Raises ValueError for a boot without a trainer, because every rented machine needs one.
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
            image = None if docker_run else boot.image or STOCK_IMAGE
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
    """Return the registry server of an image reference; a reference without a host means Docker Hub."""
    first, slash, _ = reference.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else HUB


def _script(name: str) -> str:
    return (files("providers") / "machine" / name).read_text("utf-8")


IMAGE_FIX = "check trainer.image and its login, or the job's script.image"
_REFUSED = re.compile(
    r"manifest unknown|manifest for \S+ not found|pull access denied|repository \S+ not found|name unknown|"
    r"no matching manifest|invalid reference format|requested access to the resource is denied|"
    r"error response from daemon: (denied|unauthorized)|/v2/\S* (denied|unauthorized|forbidden)|"
    r"unauthorized: (authentication required|incorrect username)|no basic auth credentials|"
    r"failed to resolve reference [^;]*: not found",
    re.I,
)
"""Answers of the registry about the image or its login. A time-out, full disk or rate limit may affect one host."""


_CANNOT_START = re.compile(
    r"OCI runtime (create|exec) failed|failed to create (shim )?task|error during container init|"
    r"nvidia-container-(cli|runtime)|could not select device driver|driver rpc error|"
    r"driver/library version mismatch|driver version is insufficient|unsatisfied condition: cuda|"
    r"no nvidia (devices|driver)|failed to initialize NVML|unresolvable CDI devices?|"
    r"no space left on device|disk quota exceeded|failed to register layer|input/output error|read-only file system|"
    r"exec format error|cannot allocate memory",
    re.I,
)
"""Errors of a host's driver, container runtime or disk, after which the container never starts there."""


def cannot_start(message: str) -> bool:
    """Return True if the host cannot start the container, so that only another host helps."""
    return _CANNOT_START.search(message) is not None


def image_refused(message: str) -> bool:
    """Return True if the registry itself refuses the image, so that another machine would fail too."""
    return _REFUSED.search(message) is not None


CONTAINER = "gpubroker-trainer"
"""Name of the trainer's container if `docker run` starts it."""
SHELL = ("bash", "-l")


def reaching(command: Sequence[str], *, docker_run: bool, tty: bool) -> str:
    """Return `command` quoted for the remote shell, inside the trainer's container if it exists; empty: a login shell.

    The command runs as root, because inspecting another user's process requires it.
    """
    words = list(command) or list(SHELL)
    if docker_run:
        words = ["sudo", "docker", "exec", "-it" if tty else "-i", "--user", "0:0", CONTAINER, *words]
    return shlex.join(words)

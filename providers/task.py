"""What SkyPilot runs on a rented machine: the trainer, and no word of the user's."""

from dataclasses import dataclass, field

from broker.domain.instance import BootSpec


@dataclass(frozen=True, kw_only=True)
class Task:
    """`setup` and `run` are texts of ours alone; what varies travels in the environment."""

    setup: str
    """Run once on every node before `run`; part of the launch."""
    run: str
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    """Environment of both that SkyPilot redacts."""
    image: str | None = None
    """What the machine is made of where the cloud takes images (`docker:…@sha256:…`)."""
    registry_login: tuple[str, str, str] | None = field(default=None, repr=False)
    """(server, user name, password) of a private registry."""
    nodes: int = 1


def task_of(boot: BootSpec, *, docker_run: bool) -> Task:
    """The task of one attempt. `docker_run`: the machine is a plain one, and the image is run on it."""
    raise NotImplementedError

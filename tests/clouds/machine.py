"""Interface between the emulated APIs and the machines behind them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol


@dataclass(frozen=True, kw_only=True)
class MachineSpec:
    """Request to boot a machine."""

    id: str
    user: Literal["root", "ubuntu"]
    public_keys: tuple[str, ...]
    """Lines of `authorized_keys`."""
    ip: str
    """Loopback address (127.x.y.z) that no other machine has."""
    ssh_port: int
    startup: str = ""
    """Shell script that the cloud runs inside at boot: RunPod's dockerArgs, decoded; Vast's onstart."""
    env: Mapping[str, str] = field(default_factory=dict)
    image: str = ""
    private_ip: str = ""
    """Address at which the other machines of its cloud reach it; empty: `inner_ip` derives one."""
    host_key: str = ""
    """Private SSH host key that cloud-init installs instead of the image's; empty: none."""
    imds: Mapping[str, str] | None = None
    """AWS: contents of the instance metadata service by path; None: the cloud has no such service."""

    @property
    def inner_ip(self) -> str:
        """Return the machine's address in the cloud's own network."""
        return self.private_ip or f"10.{self.ip.partition('.')[2]}"


class Machine(Protocol):
    """Booted machine. `spec`: the request from which it was booted."""

    @property
    def spec(self) -> MachineSpec: ...
    @property
    def alive(self) -> bool: ...
    @property
    def root(self) -> Path | None:
        """Upper folder of the overlay: the files written on the machine's disk, also after its end. None: no disk."""
        ...

    async def ready(self) -> None:
        """Wait until sshd answers and `startup` has run. Raises RuntimeError when it died before."""
        ...

    async def kill(self) -> None:
        """Kill everything in the machine at once, by SIGKILL. A dead machine is not an error."""
        ...


class Machines(Protocol):
    """Backend that boots machines."""

    async def boot(self, spec: MachineSpec) -> Machine:
        """Start a machine without waiting for its boot; `Machine.ready` waits."""
        ...

    async def close(self) -> None:
        """Kill the remaining machines and free their resources."""
        ...


class PaperMachine:
    """Machine without processes, which is ready at once."""

    root: Path | None = None

    def __init__(self, spec: MachineSpec) -> None:
        self.spec = spec
        self.alive = True

    async def ready(self) -> None:
        if not self.alive:
            raise RuntimeError(f"machine {self.spec.id} died before it was ready")

    async def kill(self) -> None:
        self.alive = False


class PaperMachines:
    """Backend of `PaperMachine`s, for tests that need a cloud's API and no real machine."""

    def __init__(self) -> None:
        self.booted: list[PaperMachine] = []

    async def boot(self, spec: MachineSpec) -> PaperMachine:
        machine = PaperMachine(spec)
        self.booted.append(machine)
        return machine

    async def close(self) -> None:
        for machine in self.booted:
            await machine.kill()

"""Machines as customers of a cloud use them: ssh, disk, network and sudden end."""

import asyncio
import os
import shlex
import signal
import sys
import textwrap
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clouds.bake import CHECKOUT, NoBake, cache_folder
from tests.clouds.machine import MachineSpec
from tests.clouds.machines import NamespaceMachine, NamespaceMachines, NoNamespaces
from tests.clouds.required import cannot
from tests.clouds.wait import until

OUTSIDE = 9000
"""Port on 127.0.0.1 inside that leads to the test's own server."""
HELLO = b"hello from the host"


@dataclass(frozen=True, kw_only=True)
class Fleet:
    machines: NamespaceMachines
    key: Path
    public: str
    numbers: list[int]

    def spec(self, user: str, **changes: object) -> MachineSpec:
        self.numbers.append(len(self.numbers) + 1)
        number = self.numbers[-1]
        fields: dict[str, object] = {"id": f"m{number}", "user": user, "public_keys": (self.public,)}
        fields |= {"ip": f"127.77.1.{number}", "ssh_port": 40200}
        return MachineSpec(**(fields | changes))  # type: ignore[arg-type]

    async def boot(self, user: str, **changes: object) -> NamespaceMachine:
        machine = await self.machines.boot(self.spec(user, **changes))
        await machine.ready()
        return machine

    async def ssh(self, machine: NamespaceMachine, command: str, stdin: bytes = b"") -> tuple[int, str]:
        spec = machine.spec
        options = ("BatchMode=yes", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR",
                   "IdentitiesOnly=yes", "ConnectTimeout=10")  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            "ssh", "-F", "none", "-i", str(self.key), "-p", str(spec.ssh_port), *(f"-o{option}" for option in options),
            f"{spec.user}@{spec.ip}", command,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate(stdin)
        return process.returncode or 0, output.decode()


async def _greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HELLO)
    writer.close()


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    server = await asyncio.start_server(_greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        machines = await NamespaceMachines.open(forwards={OUTSIDE: port})
    except (NoNamespaces, NoBake) as e:
        cannot(e)
    key = tmp_path_factory.mktemp("key") / "key"
    try:
        keygen = await asyncio.create_subprocess_exec("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        assert await keygen.wait() == 0
        yield Fleet(machines=machines, key=key, public=key.with_suffix(".pub").read_text(), numbers=[])
    finally:
        await machines.close()
        server.close()


@pytest.mark.parametrize(("user", "home"), [("root", "/root"), ("ubuntu", "/home/ubuntu")])
async def test_ssh_reaches_each_user_with_nothing_but_a_stock_image_there(fleet: Fleet, user: str, home: str) -> None:
    machine = await fleet.boot(user)
    code, output = await fleet.ssh(machine, "whoami && echo $HOME && sudo id -u && ls -A && ! command -v uv")
    assert code == 0, output
    lines = output.splitlines()
    assert lines[:3] == [user, home, "0"]
    assert set(lines[3:]) <= {".bash_logout", ".bashrc", ".profile", ".ssh"}, "somebody's runtime is baked"
    await machine.kill()


async def test_a_key_that_was_not_given_is_refused(fleet: Fleet) -> None:
    machine = await fleet.boot("ubuntu", public_keys=())
    code, output = await fleet.ssh(machine, "true")
    assert (code, "Permission denied" in output) == (255, True)


async def test_much_data_goes_both_ways(fleet: Fleet) -> None:
    machine = await fleet.boot("ubuntu")
    data = os.urandom(3_000_000).hex().encode()
    _, output = await fleet.ssh(machine, "cat", data)
    assert output.encode() == data


async def test_the_trainer_is_the_checkouts(fleet: Fleet) -> None:
    machine = await fleet.boot("root")
    code, output = await fleet.ssh(
        machine, "/srv/venv/bin/python -c 'import torch, trainer.contract as c; print(c.__file__)'"
    )
    assert (code, output.strip()) == (0, "/srv/venv/lib/python3.11/site-packages/trainer/contract/__init__.py")


async def test_only_forwarded_ports_lead_out(fleet: Fleet) -> None:
    machine = await fleet.boot("ubuntu")
    port = next(iter(fleet.machines.forwards.values()))[1]
    _, output = await fleet.ssh(machine, f"nc 127.0.0.1 {OUTSIDE} < /dev/null; nc -z 127.0.0.1 {port} || echo refused")
    assert output == HELLO.decode() + "refused\n"


async def test_startup_runs_with_the_environment_and_may_sleep_for_ever(fleet: Fleet) -> None:
    startup = 'echo "$COLOUR $HOME" > ~/started; sleep infinity'
    machine = await fleet.boot("root", startup=startup, env={"COLOUR": "blue"})
    assert await fleet.ssh(machine, "cat started") == (0, "blue /root\n")


async def test_runpods_own_startup_needs_no_network(fleet: Fleet) -> None:
    startup = textwrap.dedent("""\
        apt update; export DEBIAN_FRONTEND=noninteractive; apt install openssh-server rsync curl patch -y
        echo installed: $? > /root/apt; apt install postgresql -y; echo missing: $? >> /root/apt
        apt-get install --reinstall curl; echo unknown: $? >> /root/apt
        cd /etc/ssh/ && ssh-keygen -A; service ssh restart; sleep infinity""")
    machine = await fleet.boot("root", startup=startup)
    assert await fleet.ssh(machine, "cat /root/apt") == (0, "installed: 0\nmissing: 100\nunknown: 100\n")


async def test_kill_ends_everything_and_leaves_the_disk(fleet: Fleet) -> None:
    machine = await fleet.boot("ubuntu")
    await fleet.ssh(machine, "echo secret > ~/left; nohup setsid sleep 1000 > /dev/null 2>&1 &")
    running = asyncio.create_task(fleet.ssh(machine, "echo started > ~/long; sleep 1000"))
    assert machine.root is not None
    started = machine.root / "home/ubuntu/long"
    await until(started.exists)
    await machine.kill()
    assert not machine.alive
    assert (await running)[0] == 255
    assert (machine.root / "home/ubuntu/left").read_text() == "secret\n"
    assert (await fleet.ssh(machine, "true"))[0] == 255
    await machine.kill()
    with pytest.raises(RuntimeError, match="died"):
        await machine.ready()


async def test_a_machine_may_shut_itself_down(fleet: Fleet) -> None:
    machine = await fleet.boot("ubuntu")
    ended: list[bool] = []
    machine.died = ended.append
    await fleet.ssh(machine, "sudo shutdown -h now")
    await until(lambda: ended == [True])
    assert not machine.alive


async def test_machines_reach_each_other_only(fleet: Fleet) -> None:
    if fleet.machines.no_lan:
        pytest.skip(fleet.machines.no_lan)
    head, worker = await fleet.boot("ubuntu"), await fleet.boot("ubuntu")
    listening = asyncio.create_task(fleet.ssh(head, "touch /tmp/up; nc -lN 6380 < /dev/null"))
    assert head.root is not None
    await until((head.root / "tmp/up").exists)
    said = f"until echo hello | nc -N {head.spec.inner_ip} 6380; do sleep 0.05; done; ip route get 192.0.2.1"
    code, output = await fleet.ssh(worker, said)
    assert (code, output) == (2, "RTNETLINK answers: Network is unreachable\n")
    assert await listening == (0, "hello\n")


@pytest.mark.parametrize("user", ["root", "ubuntu"])
async def test_the_trainers_own_installer_needs_no_network(fleet: Fleet, user: str) -> None:
    machine = await fleet.boot(user)
    packing = await asyncio.create_subprocess_exec(
        "tar", "-c", "deploy", "trainer", "pyproject.toml", "constraints-trainer.txt", cwd=CHECKOUT,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    packed, _ = await packing.communicate()
    said = "mkdir ~/bundle && tar -xC ~/bundle && bash ~/bundle/deploy/trainer_install.sh /srv/venv"
    code, output = await fleet.ssh(machine, said, packed)
    assert (code, "trainer ready" in output) == (0, True), output


# ------------------------------------------------------------------------------------------------------- docker's shim

IMAGE = f"registry.example.org/trainer@sha256:{'ab' * 32}"
RUN = ("sudo docker run --rm --name trainer --pull never --gpus all --ipc host --network host --ulimit memlock=-1 "
       "--ulimit stack=67108864 --security-opt no-new-privileges --stop-timeout 120 --user 1000:1000 "
       "--volume /var/tmp/work:/var/tmp/work --workdir /var/tmp/work --env-file /dev/stdin")  # fmt: skip


async def docked(fleet: Fleet) -> NamespaceMachine:
    """Return a machine with the image pulled and a folder for the container."""
    machine = await fleet.boot("ubuntu")
    made = "sudo install -d -o 1000 -g 1000 /var/tmp/work"
    assert (await fleet.ssh(machine, f"sudo docker info && sudo docker pull --quiet {IMAGE} && {made}"))[0] == 0
    return machine


async def test_docker_runs_the_command_as_the_user_with_only_the_given_env(fleet: Fleet) -> None:
    machine = await docked(fleet)
    program = "import os, trainer.contract; print(os.getuid(), os.getpid(), os.getcwd(), sorted(os.environ)); " \
              "print(os.environ['A'], os.listdir('/home'), open('left', 'w').write('x'))"  # fmt: skip
    command = f"TOKEN=secret {RUN} {IMAGE} /srv/venv/bin/python -c {shlex.quote(program)}"
    code, output = await fleet.ssh(machine, command, b"A=b = c\n# no\n")
    names = "['A', 'HOME', 'HOSTNAME', 'LC_CTYPE', 'PATH', 'PYTHONUNBUFFERED']"
    assert (code, output) == (0, f"1000 1 /var/tmp/work {names}\nb = c [] 1\n")
    assert machine.root is not None
    assert (machine.root / "var/tmp/work/left").read_text() == "x"


async def test_docker_returns_the_exit_status_and_forwards_signals(fleet: Fleet) -> None:
    machine = await docked(fleet)
    assert (await fleet.ssh(machine, f"{RUN} {IMAGE} sh -c 'exit 75'"))[0] == 75
    trap = "sh -c 'trap \"exit 71\" TERM; touch up; while :; do sleep 0.05; done'"
    running = asyncio.create_task(fleet.ssh(machine, f"{RUN} {IMAGE} {trap}"))
    assert machine.root is not None
    await until((machine.root / "var/tmp/work/up").exists)
    assert await fleet.ssh(machine, "sudo docker exec -i trainer sh -c 'echo $$ $(whoami)'") != (0, "")
    assert (await fleet.ssh(machine, "sudo docker stop trainer"))[0] == 0
    assert (await running)[0] == 71


async def test_docker_rm_force_kills(fleet: Fleet) -> None:
    machine = await docked(fleet)
    running = asyncio.create_task(fleet.ssh(machine, f"{RUN} {IMAGE} sh -c 'touch up; sleep 1000'"))
    assert machine.root is not None
    await until((machine.root / "var/tmp/work/up").exists)
    assert (await fleet.ssh(machine, "sudo docker rm --force trainer"))[0] == 0
    assert await running == (137, "")
    assert (await fleet.ssh(machine, "sudo docker rm --force trainer"))[0] == 1


@pytest.mark.parametrize(("command", "code", "words"), [
    (f"{RUN} --privileged {IMAGE} true", 125, "unknown flag: --privileged"),
    (f"{RUN} --volume /:/host {IMAGE} true", 0, ""),
    (f"{RUN} --volume /srv:/root/x {IMAGE} true", 125, "not emulated"),
    (f"{RUN} --gpus 2 {IMAGE} true", 125, "invalid argument"),
    (f"{RUN} registry.example.org/trainer:latest true", 125, "invalid reference"),
    (f"{RUN} {IMAGE[:-2]}cd true", 125, "No such image"),
    (f"docker pull {IMAGE}", 1, "permission denied"),
    (f"sudo docker pull registry.example.org/trainer@sha256:{'dead' * 16}", 1, "manifest unknown"),
    (f"sudo docker pull private.{IMAGE}", 1, "no basic auth"),
    ("echo wrong-password | sudo docker login --username u --password-stdin example.org", 1, "unauthorized"),
    ("sudo docker build .", 125, "not a docker command"),
])  # fmt: skip
async def test_docker_refuses_what_docker_or_this_shim_does_not_know(
    docked_machine: tuple[Fleet, NamespaceMachine], command: str, code: int, words: str
) -> None:
    fleet, machine = docked_machine
    got, output = await fleet.ssh(machine, command)
    assert got == code, output
    assert words in output


async def test_docker_pulls_from_a_private_registry_after_a_login(fleet: Fleet) -> None:
    machine = await docked(fleet)
    login = "sudo docker --config /tmp/d login --username u --password-stdin private.registry.example.org"
    code, output = await fleet.ssh(machine, f"echo p | {login} && sudo docker --config /tmp/d pull -q private.{IMAGE}")
    assert (code, "private" in output) == (0, True)


@pytest.fixture(scope="module")
async def docked_machine(fleet: Fleet) -> tuple[Fleet, NamespaceMachine]:
    return fleet, await docked(fleet)


# ---------------------------------------------------------------------------------------------------- the owner's end

OWNER = """
import asyncio, sys
from tests.clouds.machine import MachineSpec
from tests.clouds.machines import NamespaceMachines
async def main():
    machines = await NamespaceMachines.open()
    spec = MachineSpec(id="orphan", user="root", public_keys=(), ip="127.77.2.1", ssh_port=40300)
    machine = await machines.boot(spec)
    await machine.ready()
    await machine.run("bash", "-c", f"exec -a {sys.argv[1]} sleep 1000 < /dev/null > /dev/null 2>&1 &")
    print(machines._folder, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def named(marker: str) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if file.read_bytes().startswith(marker.encode()):
                found.append(file.parent.name)
        except OSError:
            continue
    return found


async def test_kill_9_of_the_owner_leaves_nothing(fleet: Fleet) -> None:
    marker = f"orphan-of-{os.getpid()}"
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, marker, stdout=asyncio.subprocess.PIPE)
    assert owner.stdout is not None
    try:
        folder = Path((await asyncio.wait_for(owner.stdout.readline(), 300)).decode().strip())
        assert folder.parent == cache_folder() / "run"
        await until(lambda: bool(named(marker)))  # its shell was forked, and may not have become it yet
    finally:
        owner.send_signal(signal.SIGKILL)
        await owner.wait()
    await until(lambda: not named(marker))
    assert folder.exists()
    await (await NamespaceMachines.open()).close()
    assert not folder.exists()

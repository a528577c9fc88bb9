"""Transfer of a task to machines: `ssh` is a program of the test that runs its command in a home of its own."""

import stat
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from providers.skypilot.plugin import ssh as sky_ssh
from providers.skypilot.plugin.host_keys import user_data_with_host_key
from providers.skypilot.plugin.shared import PLUGIN_FILES
from providers.skypilot.plugin.ssh import owner_only_tar, start_tasks

SSH = """#!/bin/bash
# The machine of the home that is the first argument; what was said and asked stays in its folder.
cd "$1" || exit
n=$(cat tries 2>/dev/null || echo 0); echo $((n + 1)) >tries
if [ "$n" -lt "$(cat deaf 2>/dev/null || echo 0)" ]; then echo "Connection refused" >&2; exit 255; fi
printf '%s\\n' "$*" >>argv
HOME=$1 bash -c "${@: -1}"
code=$?
if [ -e breaks ]; then rm breaks; exit 255; fi # after it was done
exit $code
"""
ENV = "SECRET='it is $HOME'\nSKYPILOT_NODE_RANK=0\n"


def script() -> str:
    return PLUGIN_FILES["start.sh"].decode()


class Machine:
    """A home, and its ssh."""

    def __init__(self, home: Path) -> None:
        home.mkdir()
        self.home, program = home, home / "ssh"
        program.write_text(SSH)
        program.chmod(0o755)
        self.ssh: Sequence[str] = (str(program), str(home))

    @property
    def folder(self) -> Path:
        return self.home / ".gpubroker"

    def text(self, name: str, within_s: float = 300.0) -> str:
        """Return the text of a file as soon as the file exists."""
        until = time.monotonic() + within_s
        while not (self.folder / name).exists():
            assert time.monotonic() < until, [path.name for path in self.folder.iterdir()]
            time.sleep(0.02)
        return (self.folder / name).read_text()


def task(
    setup: str = "echo set up; umask", run: str = 'echo "$SECRET $SKYPILOT_NODE_RANK"; echo once >>times'
) -> bytes:
    return owner_only_tar({"env": ENV, "start.sh": script(), "setup.sh": setup, "run.sh": run})


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sky_ssh, "RETRY_DELAY_S", 0.01)


def test_a_task_runs_once_although_connections_break(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "m")
    (machine.home / "deaf").write_text("3")
    (machine.home / "breaks").touch()
    start_tasks([(machine.ssh, task())])
    start_tasks([(machine.ssh, task())])
    assert machine.text("code") == "0\n"
    assert machine.text("log").splitlines()[:2] == ["set up", "0022"]
    assert "it is $HOME 0" in machine.text("log")
    assert machine.text("times") == "once\n"
    assert "it is" not in (machine.home / "argv").read_text()


def test_another_host_key_ends_the_start_at_once(tmp_path: Path) -> None:
    """Other failures of a connection are retried for ten minutes."""
    machine = Machine(tmp_path / "m")
    program = Path(machine.ssh[0])
    program.write_text(
        "#!/bin/sh\necho x >>tries\necho 'Host key verification failed.' >&2\nexit 255\n".replace(
            "tries", str(machine.home / "tries")
        )
    )
    with pytest.raises(RuntimeError, match="shows another host key than the pinned one"):
        start_tasks([(machine.ssh, task())])
    assert (machine.home / "tries").read_text() == "x\n"


USER_DATA = "#cloud-config\nusers:\n  - name: ubuntu\nbootcmd:\n  - echo x\n"


def test_a_machine_with_user_data_is_known_before_the_first_contact(tmp_path: Path) -> None:
    """`accept-new` would send the task to any machine that answers first."""
    given = user_data_with_host_key(USER_DATA, tmp_path, "gb-abcd-a")
    config = yaml.safe_load(given)
    assert given.startswith("#cloud-config\n")
    assert {name: config[name] for name in ("users", "bootcmd")} == yaml.safe_load(USER_DATA)
    private = tmp_path / "private"
    private.touch(0o600)
    private.write_text(config["ssh_keys"]["ed25519_private"])
    shown = subprocess.run(["ssh-keygen", "-y", "-f", private], capture_output=True, text=True, check=True).stdout
    assert shown.split()[:2] == config["ssh_keys"]["ed25519_public"].split()[:2]
    pinned = sky_ssh.known_hosts_file(tmp_path, "gb-abcd-a")
    completed = subprocess.run(["ssh-keygen", "-F", "[192.0.2.7]:2222", "-f", pinned], capture_output=True, text=True)
    assert shown.split()[1] in completed.stdout
    assert config["ssh_keys"]["ed25519_private"] not in pinned.read_text()
    assert strictness(pinned) == "yes"
    assert strictness(sky_ssh.known_hosts_file(tmp_path, "gb-abcd-b")) == "accept-new"


def test_a_later_create_of_the_name_replaces_its_key(tmp_path: Path) -> None:
    one, two = (yaml.safe_load(user_data_with_host_key(USER_DATA, tmp_path, "gb-abcd-a")) for _ in range(2))
    pinned = sky_ssh.known_hosts_file(tmp_path, "gb-abcd-a").read_text()
    assert one["ssh_keys"]["ed25519_public"] not in pinned
    assert two["ssh_keys"]["ed25519_public"] in pinned


@pytest.mark.parametrize("user_data", ["#!/bin/sh\n", "", "#cloud-config\nssh_keys:\n  ed25519_public: x\n"])
def test_user_data_that_takes_no_key_pins_nothing(tmp_path: Path, user_data: str) -> None:
    assert user_data_with_host_key(user_data, tmp_path, "gb-abcd-a") == user_data
    assert not sky_ssh.known_hosts_file(tmp_path, "gb-abcd-a").exists()


def strictness(known_hosts: Path) -> str:
    login = {"user": "u", "host": "192.0.2.7", "port": 22}
    [option] = [w for w in sky_ssh.argv(login, Path("k"), known_hosts, tty=False) if w.startswith("StrictHostKey")]
    return option.partition("=")[2]


def test_each_attempt_has_its_own_file_of_host_keys(tmp_path: Path) -> None:
    first, second = (sky_ssh.known_hosts_file(tmp_path, name) for name in ("gb-abcd-a", "gb-abcd-b"))
    assert first != second
    assert first.parent == second.parent == tmp_path / sky_ssh.KNOWN_HOSTS
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    assert sky_ssh.known_hosts_file(tmp_path, "../../x").parent == first.parent


def test_secrets_are_readable_by_their_user_only_and_deleted(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "m")
    subprocess.run([*machine.ssh, sky_ssh.DELIVER], input=task(), check=True)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (machine.folder, machine.folder / "env")}
    assert modes == {".gpubroker": 0o700, "env": 0o600}
    start_tasks([(machine.ssh, task())])
    machine.text("code")
    assert not (machine.folder / "env").exists()


def test_a_task_whose_setup_fails_is_not_run(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "m")
    start_tasks([(machine.ssh, task(setup="echo gpubroker-setup: no; exit 3"))])
    assert machine.text("code") == "3\n"
    assert not (machine.folder / "running").exists()
    assert not (machine.folder / "times").exists()


def test_none_of_several_machines_begins_before_all_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sky_ssh, "ANSWER_S", 0.3)
    machines = [Machine(tmp_path / name) for name in ("a", "b")]
    (machines[1].home / "deaf").write_text("1000")
    with pytest.raises(RuntimeError, match="ended with 255: Connection refused"):
        start_tasks([(machine.ssh, task()) for machine in machines])
    assert not (machines[0].folder / "started").exists()
    (machines[1].home / "deaf").unlink()
    start_tasks([(machine.ssh, task()) for machine in machines])
    assert [machine.text("code") for machine in machines] == ["0\n", "0\n"]


def test_a_machine_that_cannot_start_the_task_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sky_ssh, "COMMAND_RETRY_S", 0.1)
    machine = Machine(tmp_path / "m")
    machine.folder.touch()
    with pytest.raises(RuntimeError, match=r"ended with 1: mkdir: cannot create directory"):
        start_tasks([(machine.ssh, task())])

#!/usr/bin/python3
"""docker for a machine without an engine: checks its arguments strictly, and runs the command over the same root.

The machine's own root file system (/srv/venv) takes the place of an image. A container has a mount namespace (homes of
other users and /tmp are hidden), a process namespace, only the given environment, and the given user. Unknown arguments
are refused as by docker: exit code 125 and a line.

Images are pulled by digest. `sha256:deaddead…` is in no registry. A registry whose host begins with `private.` wants a
login first, and `wrong-password` is not a login.
"""

import ctypes
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

STATE = Path("/run/emulated-docker")
PULLED = Path("/var/lib/emulated-docker/images")
REFERENCE = re.compile(r"[a-z0-9][a-z0-9._/:-]*@sha256:[0-9a-f]{64}")
NOWHERE = "dead" * 16
PATH = "/srv/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CLONE_NEWNS, CLONE_NEWPID, PR_SET_PDEATHSIG = 0x20000, 0x20000000, 1
IMAGE_ENV = {"PATH": PATH, "PYTHONUNBUFFERED": "1"}
HIDDEN = ("/home", "/root", "/tmp")
NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+")

# What `docker run` takes here, and the values of it.
FLAGS = {"--rm", "-i", "--interactive", "-d", "--detach"}
VALUES: Mapping[str, re.Pattern[str]] = {
    "--name": NAME, "--pull": re.compile("never|missing|always"), "--gpus": re.compile("all"),
    "--ipc": re.compile("host"), "--network": re.compile("host"), "--net": re.compile("host"),
    "--ulimit": re.compile(r"(memlock|stack|nofile)=(-1|\d+)(:(-1|\d+))?"),
    "--security-opt": re.compile("no-new-privileges(:true)?"), "--stop-timeout": re.compile(r"\d+"),
    "--device": re.compile("/dev/infiniband"), "--user": re.compile(r"\d+:\d+"),
    "--volume": re.compile(r"/[^:]*:/[^:]+(:ro|:rw)?"), "--workdir": re.compile("/.*"), "--env-file": re.compile("/.*"),
}  # fmt: skip
SHORT = {"-u": "--user", "-v": "--volume", "-w": "--workdir"}


class Refused(Exception):
    """Printed to stderr; `code` is docker's exit status."""

    def __init__(self, message: str, code: int = 125) -> None:
        super().__init__(message)
        self.code = code


@dataclass(kw_only=True)
class Wanted:
    """A parsed `docker run`."""

    flags: set[str] = field(default_factory=set)
    values: dict[str, list[str]] = field(default_factory=dict)
    image: str = ""
    command: list[str] = field(default_factory=list)

    def one(self, name: str, default: str) -> str:
        return self.values.get(name, [default])[-1]


def parse_run(words: Sequence[str]) -> Wanted:
    wanted, rest = Wanted(), list(words)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        name = SHORT.get(name, name)
        if name in FLAGS:
            wanted.flags.add(name)
            continue
        if name not in VALUES:
            raise Refused(f"unknown flag: {name}\nSee 'docker run --help'.")
        if not equals:
            if not rest:
                raise Refused(f"flag needs an argument: {name}")
            value = rest.pop(0)
        if not VALUES[name].fullmatch(value):
            raise Refused(f'docker: invalid argument "{value}" for "{name}" flag on this emulated machine.')
        wanted.values.setdefault(name, []).append(value)
    if not rest:
        raise Refused('"docker run" requires at least 1 argument.')
    wanted.image, wanted.command = rest[0], rest[1:] or ["/srv/venv/bin/python", "-m", "trainer"]
    return wanted


def pulled(image: str) -> bool:
    return PULLED.exists() and image in PULLED.read_text().splitlines()


def pull_image(image: str, config: Path) -> None:
    if not REFERENCE.fullmatch(image):
        raise Refused(f"invalid reference format: {image} (this emulated registry serves digests only)", 1)
    server = image.partition("/")[0]
    if image.endswith(NOWHERE):
        raise Refused(f"Error response from daemon: manifest for {image} not found: manifest unknown", 1)
    if server.startswith("private.") and server not in logins(config):
        raise Refused(f"Error response from daemon: Head {image}: no basic auth credentials", 1)
    PULLED.parent.mkdir(parents=True, exist_ok=True)
    with open(PULLED, "a", encoding="utf-8") as file:
        file.write(f"{image}\n")


def logins(config: Path) -> Mapping[str, object]:
    try:
        found: Mapping[str, object] = json.loads((config / "config.json").read_text())["auths"]
    except FileNotFoundError:
        return {}
    return found


def login(words: Sequence[str], config: Path) -> int:
    match words:
        case ["--username" | "-u", user, "--password-stdin", server] if user and not server.startswith("-"):
            pass
        case _:
            raise Refused("docker login: only `--username USER --password-stdin SERVER` is known here")
    password = sys.stdin.read().strip()
    if not password:
        raise Refused("Error: Password Required", 1)
    if password == "wrong-password":
        raise Refused(f"Error response from daemon: Get https://{server}/v2/: unauthorized: authentication required", 1)
    config.mkdir(parents=True, exist_ok=True)
    (config / "config.json").write_text(json.dumps({"auths": {**logins(config), server: {}}}))
    print("Login Succeeded")
    return 0


def pull(words: Sequence[str], config: Path) -> int:
    images = [word for word in words if word not in ("-q", "--quiet")]
    if len(images) != 1 or images[0].startswith("-"):
        raise Refused(f"unknown arguments: docker pull {' '.join(words)}")
    pull_image(images[0], config)
    print(images[0])
    return 0


def environment(wanted: Wanted) -> dict[str, str]:
    env = {**IMAGE_ENV, "HOME": "/", "HOSTNAME": os.uname().nodename}
    for file in wanted.values.get("--env-file", []):
        for line in Path(file).read_text().splitlines():
            if not line or line.startswith("#"):
                continue
            name, equals, value = line.partition("=")
            if not equals or not name or " " in name:
                raise Refused(
                    f"docker: invalid env file ({file}): variable '{name}' contains white spaces or no value."
                )
            env[name] = value
    return env


def container_script(wanted: Wanted) -> str:
    """Return a script that runs as root in the new mount namespace and then executes the user's command."""
    lines = ["set -e", "mount --make-rprivate /", "mount -t proc proc /proc"]
    for volume in wanted.values.get("--volume", []):
        outside, inside, *mode = volume.split(":")
        lines += [f"mkdir -p '{inside}'", f"mount --bind '{outside}' '{inside}'"]
        lines += [f"mount -o remount,bind,ro '{inside}'"] if mode == ["ro"] else []
    lines += [f"mount -t tmpfs -o mode={1777 if path == '/tmp' else 755} none {path}" for path in HIDDEN]
    uid, gid = wanted.one("--user", "0:0").split(":")
    drop = f"setpriv --reuid {uid} --regid {gid} --clear-groups"
    drop += " --no-new-privs" if "--security-opt" in wanted.values else ""
    return "\n".join([*lines, f"cd '{wanted.one('--workdir', '/')}'", f'exec env -u PWD -u OLDPWD {drop} -- "$@"'])


def run(words: Sequence[str], config: Path) -> int:
    wanted = parse_run(words)
    if not REFERENCE.fullmatch(wanted.image):
        raise Refused(f"docker: invalid reference format: {wanted.image} (images are run by digest here).")
    if not pulled(wanted.image):
        if wanted.one("--pull", "missing") == "never":
            raise Refused(f"docker: Error response from daemon: No such image: {wanted.image}.")
        pull_image(wanted.image, config)
    name = wanted.one("--name", f"unnamed-{os.getpid()}")
    record = STATE / name
    if init_of(name):
        raise Refused(f'docker: Error response from daemon: Conflict. The container name "/{name}" is already in use.')
    for volume in wanted.values.get("--volume", []):
        if any(volume.split(":")[1].startswith(path) for path in HIDDEN):
            raise Refused(f"docker: volumes below {', '.join(HIDDEN)} are not emulated: {volume}")
    env, interactive = environment(wanted), bool(wanted.flags & {"-i", "--interactive"})
    engine = os.fork()
    if engine == 0:
        contain(["/bin/sh", "-c", container_script(wanted), "sh", *wanted.command], env, interactive=interactive)
    STATE.mkdir(exist_ok=True)
    record.write_text(f"{engine} {wanted.one('--stop-timeout', '10')}")
    if wanted.flags & {"-d", "--detach"}:
        print(name)
        return 0
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda received, _: send(name, received))
    code = os.waitstatus_to_exitcode(os.waitpid(engine, 0)[1])
    record.unlink(missing_ok=True)
    return code


def contain(argv: Sequence[str], env: Mapping[str, str], *, interactive: bool) -> NoReturn:
    """Run `argv` as process 1 of a container, and end with its exit status in docker's form."""
    os.setsid()
    if not interactive:
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS | CLONE_NEWPID) != 0:
        os._exit(125)
    child = os.fork()
    if child == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.execve(argv[0], list(argv), dict(env))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def init_of(name: str) -> int:
    """Return the PID of process 1 of a running container; 0 if there is none."""
    try:
        engine = int((STATE / name).read_text().split()[0])
        children = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return 0
    return int(children[0]) if children else 0


def send(name: str, number: int) -> None:
    if pid := init_of(name):
        os.kill(pid, number)


def gone(name: str, within_s: float) -> bool:
    pid = init_of(name)
    if not pid:
        return True
    pidfd = os.pidfd_open(pid)
    return bool(select.select([pidfd], [], [], within_s)[0])


def remove(words: Sequence[str], _: Path) -> int:
    names = [word for word in words if word not in ("-f", "--force")]
    if len(names) != 1 or len(words) != 2 or names[0].startswith("-"):
        raise Refused("docker rm: only `docker rm --force NAME` is known here")
    if not (STATE / names[0]).exists():
        raise Refused(f"Error response from daemon: No such container: {names[0]}", 1)
    send(names[0], signal.SIGKILL)
    gone(names[0], 10)
    (STATE / names[0]).unlink(missing_ok=True)
    print(names[0])
    return 0


def stop(words: Sequence[str], _: Path) -> int:
    if len(words) != 1 or words[0].startswith("-"):
        raise Refused("docker stop: only `docker stop NAME` is known here")
    if not init_of(words[0]):
        raise Refused(f"Error response from daemon: No such container: {words[0]}", 1)
    send(words[0], signal.SIGTERM)
    if not gone(words[0], float((STATE / words[0]).read_text().split()[1])):
        send(words[0], signal.SIGKILL)
    print(words[0])
    return 0


def execute(words: Sequence[str], _: Path) -> int:
    rest, user = list(words), "0:0"
    while rest and rest[0] in ("-i", "-t", "-it", "--interactive", "--tty"):
        rest.pop(0)
    if len(rest) > 2 and rest[0] in ("-u", "--user") and VALUES["--user"].fullmatch(rest[1]):
        user, rest = rest[1], rest[2:]
    if len(rest) < 2 or rest[0].startswith("-"):
        raise Refused("docker exec: only `docker exec [-it] [--user U:G] NAME COMMAND…` is known here")
    pid = init_of(rest[0])
    if not pid:
        raise Refused(f"Error response from daemon: No such container: {rest[0]}", 1)
    uid, gid = user.split(":")
    drop = ["setpriv", "--reuid", uid, "--regid", gid, "--clear-groups", "--"]
    return subprocess.run(["nsenter", "--target", str(pid), "--mount", "--pid", *drop, *rest[1:]],
                          env=IMAGE_ENV | {"HOME": "/"}).returncode  # fmt: skip


def info(words: Sequence[str], _: Path) -> int:
    if words:
        raise Refused(f"unknown arguments: docker info {' '.join(words)}")
    print("Server:\n Runtimes: io.containerd.runc.v2 nvidia runc\n Default Runtime: runc")
    return 0


def inspect(words: Sequence[str], _: Path) -> int:
    if len(words) != 1 or words[0].startswith("-"):
        raise Refused("docker inspect: only `docker inspect NAME` is known here")
    if not (STATE / words[0]).exists():
        raise Refused(f"Error: No such object: {words[0]}", 1)
    running = bool(init_of(words[0]))
    print(json.dumps([{"Name": f"/{words[0]}", "State": {"Running": running, "Pid": init_of(words[0])}}]))
    return 0


COMMANDS: Mapping[str, Callable[[Sequence[str], Path], int]] = {
    "login": login, "pull": pull, "run": run, "rm": remove, "stop": stop, "exec": execute, "info": info,
    "inspect": inspect,
}  # fmt: skip


def main() -> int:
    words, config = sys.argv[1:], Path("/root/.docker")
    try:
        if words[:1] == ["--config"] and len(words) > 2:
            config, words = Path(words[1]), words[2:]
        if not words or words[0] not in COMMANDS:
            raise Refused(f"docker: '{' '.join(words[:1])}' is not a docker command that is known here.")
        if os.geteuid() != 0:
            raise Refused("permission denied while trying to connect to the Docker daemon socket", 1)
        return COMMANDS[words[0]](words[1:], config)
    except Refused as e:
        print(e, file=sys.stderr)
        return e.code


if __name__ == "__main__":
    sys.exit(main())

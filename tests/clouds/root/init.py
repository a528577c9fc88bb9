"""Process 1 of an emulated machine: boots it, reaps processes, and passes connections between machine and host.

The only way out is the control socket. Its messages are JSON, one per packet, each with at most one file descriptor.
The host receives sockets of this machine's own network, so no socket of the host's network exists in here.

  - in: {"settings": …} first
  - in: {"connect": n, "port": p}
  - in: {"exec": n, "argv": […], "env": {…}} with a socket
  - out: {"up": true}
  - out: {"connect": n} with a socket or "error"
  - out: {"exec": n, "code": c}
  - out: {"startup": c}
  - out: {"port": p} with a socket that a process in here connected to that port
  - out: {"halt": true}
"""

import array
import contextlib
import json
import os
import pwd
import selectors
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PACKET = 1 << 20


class Init:
    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.selector = selectors.DefaultSelector()
        self.children: dict[int, tuple[dict[str, Any], subprocess.Popen[bytes]]] = {}
        self.startup = 0
        """Process id of the start-up script until its end is reported."""

    def send(self, message: dict[str, Any], sock: socket.socket | None = None) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [sock.fileno()]))] if sock else []
        self.control.sendmsg([json.dumps(message).encode()], rights)

    def hear(self) -> tuple[dict[str, Any], int | None]:
        data, rights, _, _ = self.control.recvmsg(PACKET, socket.CMSG_SPACE(4))
        if not data:
            sys.exit(0)  # the host's side is gone
        fds = array.array("i")
        for _, _, packed in rights:
            fds.frombytes(packed[:4])
        return json.loads(data), fds[0] if fds else None

    def start(self, report: dict[str, Any], argv: list[str], env: dict[str, str], fd: int) -> int:
        child = subprocess.Popen(argv, env={"PATH": PATH, "LANG": "C.UTF-8"} | env, cwd=env.get("HOME", "/"),
                                 stdin=fd, stdout=fd, stderr=fd, start_new_session=True)  # fmt: skip
        self.children[child.pid] = (report, child)
        return child.pid

    def bring_up(self, settings: dict[str, Any]) -> None:
        socket.sethostname(settings["hostname"])
        Path("/etc/hostname").write_text(settings["hostname"] + "\n")
        Path("/etc/hosts").write_text(f"127.0.0.1 localhost {settings['hostname']}\n")
        commands = ["link set lo up"]
        commands += [f"address add {address}/32 dev lo" for address in (settings["imds"], settings["address"])]
        subprocess.run(["ip", "-batch", "-"], input="\n".join(commands), text=True, check=True)
        Path("/run/sshd").mkdir()
        Path("/run/lock").mkdir(mode=0o1777)
        self.authorize(settings["user"], settings["keys"])
        if settings["host_key"]:
            self.replace_host_keys(settings["host_key"])
        for address, port in settings["listen"]:
            listener = socket.create_server((address, port), backlog=128)
            self.selector.register(listener, selectors.EVENT_READ, self.accept)
        subprocess.run(["/usr/sbin/sshd"], check=True)
        if settings["startup"]:
            log = os.open("/var/log/startup.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            env = {"HOME": "/root", "USER": "root"} | settings["env"]
            self.startup = self.start({"startup": None}, ["/bin/bash", "-c", settings["startup"]], env, log)
            os.close(log)
        else:
            self.send({"startup": 0})

    def authorize(self, user: str, keys: list[str]) -> None:
        account = pwd.getpwnam(user)
        folder = Path(account.pw_dir, ".ssh")
        folder.mkdir(mode=0o700, exist_ok=True)
        file = folder / "authorized_keys"
        file.write_text("".join(f"{key.strip()}\n" for key in keys))
        file.chmod(0o600)
        for path in (folder, file):
            os.chown(path, account.pw_uid, account.pw_gid)

    def replace_host_keys(self, private: str) -> None:
        """Install the given host key alone, as cloud-init does."""
        for path in Path("/etc/ssh").glob("ssh_host_*"):
            path.unlink()
        file = Path("/etc/ssh/ssh_host_ed25519_key")
        file.touch(mode=0o600)
        file.write_text(private)

    def accept(self, listener: Any) -> None:
        with contextlib.suppress(OSError):
            accepted, _ = listener.accept()
            with accepted:
                address, port = accepted.getsockname()
                self.send({"port": port, "address": address}, accepted)

    def obey(self, control: Any) -> None:
        message, fd = self.hear()
        if "connect" in message:
            try:
                with socket.create_connection(("127.0.0.1", message["port"]), timeout=5) as connected:
                    connected.setblocking(True)
                    self.send({"connect": message["connect"]}, connected)
            except OSError as e:
                self.send({"connect": message["connect"], "error": str(e)})
        elif "exec" in message and fd is not None:
            try:
                self.start({"exec": message["exec"]}, message["argv"], message["env"], fd)
            except OSError as e:
                self.send({"exec": message["exec"], "code": 127, "error": str(e)})
        if fd is not None:
            os.close(fd)

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.children:
                report, child = self.children.pop(pid)
                child.returncode = os.waitstatus_to_exitcode(status)
                if "exec" in report:
                    self.send(report | {"code": child.returncode})
                elif pid == self.startup:
                    self.report_startup(child.returncode)

    def report_startup(self, code: int) -> None:
        self.startup = 0
        self.send({"startup": code})

    def watch_startup(self) -> None:
        """Wait until the start-up script has run: until it executes its final `sleep infinity`."""
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if file.read_bytes() == b"sleep\0infinity\0":
                    return self.report_startup(0)

    def run(self) -> None:
        wake_r, wake_w = socket.socketpair()
        wake_w.setblocking(False)
        signal.set_wakeup_fd(wake_w.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGUSR1, lambda *_: self.halt())
        settings, _ = self.hear()
        self.bring_up(settings["settings"])
        self.send({"up": True})
        self.selector.register(self.control, selectors.EVENT_READ, self.obey)
        self.selector.register(wake_r, selectors.EVENT_READ, lambda sock: sock.recv(4096))
        while True:
            for key, _ in self.selector.select(0.1 if self.startup else None):
                key.data(key.fileobj)
            self.reap()
            if self.startup:
                self.watch_startup()

    def halt(self) -> None:
        """Execute `shutdown`: see power.sh."""
        self.send({"halt": True})
        sys.exit(0)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    null, log = os.open("/dev/null", os.O_RDONLY), os.open("/var/log/init.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(null, 0)
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        Init(control).run()
    except Exception as e:
        with contextlib.suppress(OSError):
            control.send(json.dumps({"failed": f"{type(e).__name__}: {e}"}).encode())
        raise


if __name__ == "__main__":
    main()

"""Network between machines, like a cloud's own: a bridge in an otherwise empty network namespace.

No route leads from it to this host, because the namespace has only the bridge and the machines' interfaces.
"""

import shutil
import subprocess

TOOLS = ("ip", "nsenter", "unshare")
BRIDGE = ("link add lan type bridge", "link set lan up")


class Lan:
    """Network on which attached machines reach each other at addresses with a common first number."""

    def __init__(self) -> None:
        """Create the network. Raises OSError if this host cannot."""
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if missing:
            raise OSError(f"{' and '.join(missing)} is missing: apt-get install iproute2 util-linux")
        # It ends when its stdin does, and so with this process.
        self._holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.write(b"x")
        self._holder.stdin.flush()
        self._holder.stdout.read(1)  # now it is in its namespace
        self._cables = 0
        try:
            self._in_namespace(self._holder.pid, *BRIDGE)
        except OSError:
            self.close()
            raise

    def attach(self, process: int, address: str) -> None:
        """Give the network namespace of `process` an interface with `address`. Raises OSError."""
        self._cables += 1
        cable = f"m{self._cables}"
        plug = f"link add {cable} type veth peer name eth0 netns {process}"
        self._in_namespace(self._holder.pid, plug, f"link set {cable} master lan up")
        self._in_namespace(process, f"address add {address}/8 dev eth0", "link set eth0 up")

    @staticmethod
    def _in_namespace(process: int, *commands: str) -> None:
        done = subprocess.run(["nsenter", f"--net=/proc/{process}/ns/net", "ip", "-batch", "-"],
                              input="\n".join(commands), capture_output=True, text=True)  # fmt: skip
        if done.returncode != 0:
            raise OSError(f"ip: {done.stderr.strip()}")

    def close(self) -> None:
        self._holder.communicate()

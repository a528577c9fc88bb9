"""SkyPilot's `ssh_proxy_command` for emulated AWS: `python aws_proxy.py URL ADDRESS` joins stdin and stdout to sshd.

moto invents the addresses of machines. The emulator at URL answers with the address at which the machine listens.
"""

import contextlib
import os
import socket
import sys
import threading
import urllib.request

LIMIT_S = 60.0


def upwards(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(0, 1 << 16):
            sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)


def main() -> None:
    url, address = sys.argv[1:]
    try:
        with urllib.request.urlopen(f"{url}/_machines/{address}", timeout=LIMIT_S) as answer:
            host, port = answer.read().decode().split()
        sock = socket.create_connection((host, int(port)), timeout=LIMIT_S)
    except OSError as e:
        sys.exit(f"no machine answers at {address}: {e}")
    sock.settimeout(None)
    threading.Thread(target=upwards, args=(sock,), daemon=True).start()
    with contextlib.suppress(OSError):
        while data := sock.recv(1 << 16):
            os.write(1, data)
    os._exit(0)


if __name__ == "__main__":
    main()

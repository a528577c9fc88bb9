#!/usr/bin/python3
"""apt-get and apt without a network: an installed package installs again; any other package fails as in apt."""

import subprocess
import sys

FLAGS = {"-y", "--yes", "-q", "-qq", "--no-install-recommends", "--fix-broken", "--fix-missing"}


def installed(package: str) -> bool:
    query = ["dpkg-query", "--show", "--showformat", "${db:Status-Status}", package]
    return subprocess.run(query, capture_output=True, text=True).stdout == "installed"


def main() -> int:
    words = [word for word in sys.argv[1:] if word not in FLAGS]
    unknown = [word for word in words if word.startswith("-")]
    if unknown or not words:
        print(f"E: this emulated machine's apt does not know {' '.join(unknown) or 'nothing'}", file=sys.stderr)
        return 100
    command, packages = words[0], words[1:]
    if command == "update" and not packages:
        return 0
    if command != "install":
        print(f"E: this emulated machine's apt does not know the operation {command}", file=sys.stderr)
        return 100
    for package in packages:
        if not installed(package):
            print(f"E: Unable to locate package {package}", file=sys.stderr)
            return 100
        print(f"{package} is already the newest version.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

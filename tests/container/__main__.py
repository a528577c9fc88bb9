"""Builds `deploy/Containerfile.trainer` with buildah on a base image from debootstrap, and trains in the result.

    .venv/bin/python -m tests.container

Needs root, buildah, debootstrap (`apt-get install buildah debootstrap`), 6 GB of disk and pip's configured package
indexes, but neither a container engine nor a registry. Takes minutes. The last line is one JSON object.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clouds.bake import CHECKOUT, cache_folder

NAMESPACE = Path(__file__).with_name("namespace.sh")
NEEDED = ("buildah", "debootstrap", "unshare")


def main() -> int:
    argparse.ArgumentParser(
        "python -m tests.container", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    missing = [program for program in NEEDED if shutil.which(program) is None]
    if os.geteuid() != 0 or missing:
        what = f"needs root and {', '.join(missing or NEEDED)}"
        print(f"container: {what}: apt-get install buildah debootstrap, as root", file=sys.stderr)
        return 2
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="container-", dir=cache))
    try:
        return subprocess.run(
            [NAMESPACE, sys.executable, "-m", "tests.container.inside", folder], cwd=CHECKOUT
        ).returncode
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())

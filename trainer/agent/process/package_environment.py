"""Installs a requirements file into a new virtual environment, which also has the packages of the Python that runs it.

Run as a file by the program's own Python: `python package_environment.py FOLDER REQUIREMENTS`. It needs no package.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

MISSING = "neither pip nor uv is available for {python}; use a machine or an image that has one"


def create(folder: Path) -> Path:
    """Create the environment, and return its Python.

    A virtual environment has no packages of another one by itself, only those of the system.
    """
    venv.create(folder, system_site_packages=True, with_pip=False, symlinks=True)
    if sys.prefix != sys.base_prefix:
        own = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        parents = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
        (own / "parent.pth").write_text("".join(f"{path}\n" for path in parents))
    return folder / "bin" / "python"


def install_command(python: Path, requirements: str) -> list[str]:
    """Return the install command of pip, or of uv if pip is missing. Only pip keeps the packages of the parent."""
    if subprocess.run([python, "-c", "import pip"], stderr=subprocess.DEVNULL, check=False).returncode == 0:
        options = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off")
        return [str(python), "-m", "pip", "install", *options, "--requirement", requirements]
    uv = shutil.which("uv")
    if uv is None:
        sys.exit(MISSING.format(python=sys.executable))
    return [uv, "pip", "install", "--no-progress", "--python", str(python), "--requirement", requirements]


if __name__ == "__main__":
    command = install_command(create(Path(sys.argv[1])), sys.argv[2])
    sys.stdout.flush()
    os.execv(command[0], command)

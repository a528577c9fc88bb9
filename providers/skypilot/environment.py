"""SkyPilot's own virtual environment: its location, check and installation.

SkyPilot's server runs on that environment's interpreter, because SkyPilot pins old versions of the daemon's packages.
"""

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from broker.domain.errors import Rejected
from providers.skypilot.plugin.shared import SKY_VERSION
from providers.skypilot.plugin_wheel import DIST_INFO, write_wheel

CONSTRAINTS = "constraints-skypilot.txt"
"""File with the version and the hashes of each package of the environment."""
FIX = "run `gpubroker clouds install`"


def venv_of_home(providers: Path) -> Path:
    """Return the folder of the environment that `gpubroker clouds install` makes. `providers`: `<home>/providers`."""
    return providers / "skypilot" / "venv"


def find_python(setting: Path | None, providers: Path) -> Path:
    """Return the environment's interpreter, which may be missing.

    The order is: the setting `providers.sky.python`, the environment in the home, and the environment next to the
    daemon's own. The last is `/opt/gpubroker-skypilot` in the container image, and `.venv-skypilot` in a checkout.
    """
    if setting is not None:
        return setting.expanduser().absolute()
    venvs = (venv_of_home(providers), Path(f"{sys.prefix}-skypilot"))
    return next((venv for venv in venvs if (venv / "bin" / "python").exists()), venvs[0]) / "bin" / "python"


def problem(python: Path) -> str | None:
    """Return a message with what the environment lacks and the fix, or None if SkyPilot's server can run there."""
    if not python.exists():
        return f"SkyPilot's environment is missing ({python}); {FIX}"
    installed = [path.name for path in _packages(python, "skypilot-*.dist-info")]
    if installed != [f"skypilot-{SKY_VERSION}.dist-info"]:
        name = ", ".join(name.removesuffix(".dist-info").replace("-", " ") for name in installed) or "no skypilot"
        return f"SkyPilot's environment ({python}) has {name}, not {SKY_VERSION}; {FIX}"
    return None


def has_plugin(python: Path) -> bool:
    """Return True if the environment has the plugin of this gpubroker."""
    return bool(_packages(python, DIST_INFO))


def _packages(python: Path, pattern: str) -> list[Path]:
    return sorted(python.parent.parent.glob(f"lib/python3*/site-packages/{pattern}"))


def identity(python: Path) -> str:
    """Return a text that changes if the environment moves or gets another Python: its path and its `pyvenv.cfg`."""
    settings = python.parent.parent / "pyvenv.cfg"
    return f"{python}\n{settings.read_text() if settings.exists() else ''}"


def require_plugin(python: Path) -> None:
    """Install this gpubroker's plugin, unless the environment has it. Raises Rejected.

    The daemon calls this before each start of the server, because most upgrades of gpubroker change only the plugin.
    """
    if (missing := problem(python)) is not None:
        raise Rejected(missing)
    if has_plugin(python):
        return
    try:
        with (python.parent.parent / ".gpubroker.lock").open("ab") as lock, tempfile.TemporaryDirectory() as folder:
            fcntl.flock(lock, fcntl.LOCK_EX)  # Another daemon or a test may be installing the plugin.
            if not has_plugin(python):
                wheel = write_wheel(Path(folder))
                _pip(python, "install", "--quiet", "--no-index", "--no-deps", "--force-reinstall", str(wheel))
    except OSError as e:
        raise Rejected(f"SkyPilot's environment cannot be written ({e}); {FIX}") from None


def install(venv: Path, *, find_links: Sequence[str] = ()) -> Path:
    """Make or update the environment and return its interpreter. Raises Rejected if pip fails.

    `find_links`: folders or pages with all wheels; pip then asks no package index.
    """
    python = venv / "bin" / "python"
    if not (venv / "bin" / "pip").exists():
        venv.parent.mkdir(parents=True, exist_ok=True)
        _run([sys.executable, "-m", "venv", "--clear", str(venv)])
    offline = ["--no-index", *(f"--find-links={place}" for place in find_links)] if find_links else []
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / CONSTRAINTS
        requirements.write_bytes(locked_requirements())
        _pip(python, "install", "--require-hashes", "--no-deps", *offline, "--requirement", str(requirements))
    require_plugin(python)
    return python


def locked_requirements() -> bytes:
    """Return the content of `constraints-skypilot.txt`, of the installed gpubroker or of the checkout."""
    packed = files("providers") / "skypilot" / CONSTRAINTS
    return packed.read_bytes() if packed.is_file() else (Path(__file__).parents[2] / CONSTRAINTS).read_bytes()


def _pip(python: Path, *arguments: str) -> None:
    _run([str(python), "-m", "pip", "--disable-pip-version-check", *arguments])


def _run(argv: Sequence[str]) -> None:
    """Run a program with its output on stderr (2). Raises Rejected if it fails."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, stdout=2)
    if result.returncode != 0:
        raise Rejected(f"SkyPilot's environment could not be made: `{' '.join(argv)}` ended with {result.returncode}")


if __name__ == "__main__":
    require_plugin(Path(sys.argv[1]))

"""Make a virtual environment if it is missing and install into it.

    python3 .ci/install.py [--venv FOLDER] PIP_INSTALL_ARGUMENTS...     # FOLDER: .venv by default

Installs with the uv of `.venv`, about ten times faster than pip, under pip's own settings (uv does not read them). If
uv is missing or fails, pip does the same installation. Needs nothing but Python and its venv module.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

VENV = Path(".venv")
PYTHON = VENV / "bin" / "python"
UV = VENV / "bin" / "uv"
# pip setting -> what uv calls it
SETTINGS = {
    "find-links": "UV_FIND_LINKS",
    "extra-index-url": "UV_INDEX",
    "index-url": "UV_DEFAULT_INDEX",
    "cert": "SSL_CERT_FILE",
}


def create_venv(venv: Path) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - this file runs before pip could refuse
        sys.exit(f"gpubroker needs Python 3.11 or newer, this is {sys.version.split()[0]}: make venv PYTHON=python3.11")
    if (venv / "bin" / "pip").exists():
        return
    print(f"creating {venv} with Python {sys.version.split()[0]}", flush=True)
    if subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)]).returncode != 0:
        sys.exit(f"could not create {venv}: on Debian and Ubuntu run `sudo apt-get install -y make python3-venv` first")


def pip_settings() -> dict[str, str]:
    """pip's merged configuration; environment variables come last in pip's listing and so win, as they do in pip."""
    listing = subprocess.run([PYTHON, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    versions: dict[str, str] = {}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in ("global", "install", ":env:") and value:
            versions[name] = " ".join(str(ast.literal_eval(value)).split())
    return versions


def uv_environment(settings: dict[str, str]) -> dict[str, str]:
    env = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # pip's rule: the best version of all indexes
    env |= {variable: settings[name] for name, variable in SETTINGS.items() if name in settings}
    if not {"find-links", "index-url"} & settings.keys():
        env["UV_TORCH_BACKEND"] = "auto"  # torch for this machine's driver, or the CPU build: not gigabytes of CUDA
    env["UV_FIND_LINKS"] = env.get("UV_FIND_LINKS", "").replace(" ", ",")
    return {key: value for key, value in env.items() if value} | os.environ


def install(venv: Path, arguments: list[str]) -> None:
    python = venv / "bin" / "python"
    if venv == VENV and not UV.exists():
        subprocess.run([PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv>=0.7"])
    if UV.exists():
        command = [UV, "pip", "install", "--python", python, *arguments]
        if subprocess.run(command, env=uv_environment(pip_settings())).returncode == 0:
            return
        print("uv could not install; trying pip", flush=True)
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    raise SystemExit(subprocess.run(command).returncode)


if __name__ == "__main__":
    words = sys.argv[1:]
    target = VENV
    if words[:1] == ["--venv"]:
        target, words = Path(words[1]), words[2:]
    create_venv(target)
    install(target, words)

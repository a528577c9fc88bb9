"""The base and the image, by buildah in chroot isolation, with a store of their own."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.clouds.bake import CERTIFICATES, CHECKOUT, bootstrap, cache_folder, index_settings, local_indexes

BASE_PACKAGES = ("ca-certificates", "python3", "python3-venv")
"""Packages that replace the base image `python:3.11.15-slim-bookworm`: the same Debian with its own Python 3.11."""
CONTAINERFILE = "deploy/Containerfile.trainer"
CERTIFICATES_INSIDE = "/etc/pip-certificates.crt"


class Failed(RuntimeError):
    """A step of the build; says what it printed last."""


class Store:
    """Images of one test, below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = folder / "storage.conf"
        config.write_text(f'[storage]\ndriver = "overlay"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/graph"\n')
        policy = folder / "policy.json"
        policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')  # nothing is pulled
        self._policy = ("--signature-policy", str(policy))
        self._env = os.environ | {"CONTAINERS_STORAGE_CONF": str(config), "BUILDAH_ISOLATION": "chroot"}

    def buildah(self, *argv: str, cwd: Path | None = None) -> str:
        """Run buildah and return its output. Raises Failed."""
        done = subprocess.run(["buildah", *argv], env=self._env, cwd=cwd, text=True, capture_output=True)
        if done.returncode != 0:
            raise Failed(f"buildah {argv[0]}: {(done.stdout + done.stderr)[-3000:]}")
        return done.stdout.strip()

    def make_base(self) -> str:
        root = self.folder / "base"
        root.mkdir()
        bootstrap(root, cache_folder() / "debs", BASE_PACKAGES)
        container = self.buildah("from", "scratch")
        self.buildah("add", "--quiet", container, str(root), "/")
        self.buildah("commit", "--quiet", "--rm", *self._policy, container, "localhost/base")
        return "localhost/base"

    def build(self, base: str) -> str:
        """Build `deploy/Containerfile.trainer` of the committed checkout with another FROM; return the image."""
        context = self.folder / "context"
        context.mkdir()
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=CHECKOUT, stdout=subprocess.PIPE, check=True).stdout
        subprocess.run(["tar", "-x", "-C", context], input=archive, check=True)
        admit_local_builds(context / "constraints-trainer.txt", Path(_pip_settings().get("find-links", "")))
        name = "localhost/gpubroker-trainer"
        self.buildah("build", "--isolation", "chroot", "--network", "host", "--from", base, *self._policy,
                     "--file", CONTAINERFILE, "--tag", name, *self._pip(), ".", cwd=context)  # fmt: skip
        return name

    def _pip(self) -> Sequence[str]:
        """Lend the build the indexes that pip is configured with here; nothing of it stays in the image."""
        settings = _pip_settings()
        certificates = Path(settings.get("cert", CERTIFICATES))
        if certificates.exists():
            settings["cert"] = CERTIFICATES_INSIDE
        config = self.folder / "pip.conf"
        used = ("index-url", "extra-index-url", "find-links", "cert", "proxy", "trusted-host")
        config.write_text("[global]\n" + "".join(f"{key} = {settings[key]}\n" for key in used if key in settings))
        binds = {"/etc/pip.conf": config, CERTIFICATES_INSIDE: certificates}
        binds |= {str(folder): folder for folder in local_indexes(index_settings())}
        return [f"--volume={outside}:{inside}:ro" for inside, outside in binds.items() if outside.exists()]

    def config(self, image: str) -> Mapping[str, list[str]]:
        document = json.loads(self.buildah("inspect", "--type", "image", image))
        found: Mapping[str, list[str]] = document["OCIv1"]["config"]
        return found

    def mount(self, image: str) -> Path:
        """Return a writable root file system of a new container."""
        return Path(self.buildah("mount", self.buildah("from", *self._policy, image)))


def admit_local_builds(lock: Path, wheels: Path) -> None:
    """Add this machine's build of torch to a lock, which then needs no packages of CUDA."""
    builds = [*wheels.glob("torch-*.whl")] if wheels.is_dir() else []
    if not builds:
        return
    hashes = "".join(f" \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}" for wheel in builds)
    entries = re.split(r"\n(?=\S)", lock.read_text())
    kept = [entry for entry in entries if not entry.startswith(("nvidia-", "cuda-", "triton="))]
    lock.write_text("\n".join(entry + hashes if entry.startswith("torch==") else entry for entry in kept) + "\n")


def _pip_settings() -> dict[str, str]:
    code = "import json, install; print(json.dumps(install.pip_settings()))"
    env = os.environ | {"PYTHONPATH": str(CHECKOUT / ".ci")}
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, env=env, stdout=subprocess.PIPE, check=True)
    settings: dict[str, str] = json.loads(done.stdout)
    return settings

"""Builds the root file system that every emulated machine runs over: `python -m tests.clouds.bake [--force]`.

Debian by debootstrap, as a cloud's stock image is, and in /srv/venv what the trainer imports, as
`deploy/Containerfile.trainer` installs it. Nothing of SkyPilot's is there, since launches bring nothing of it along.
All owners are shifted by BASE: see `tests.clouds.enclose`.
Needs root, debootstrap, an apt that knows Debian bookworm, and the package indexes that pip is configured with.
"""

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

CHECKOUT = Path(__file__).parent.parent.parent
ENCLOSE = Path(__file__).with_name("enclose.py")
PROVISION = Path(__file__).with_name("bake_inside.sh")
SUITE = "bookworm"
EDITION = 2
"""Version of this file's output. Raise it when the result changes for a reason that is not part of `recipe`."""
BASE = 2_000_000
"""User id outside of a machine's root."""
PACKAGES = (
    "ca-certificates", "curl", "hostname", "iproute2", "netcat-openbsd", "openssh-client", "openssh-server",
    "patch", "procps", "python3", "rsync", "sudo", "util-linux",
)  # fmt: skip
"""Debian packages. uv and python3-venv are absent, because Debian's Python is new enough and /srv/venv exists."""
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


class NoBake(RuntimeError):
    """Raised if the root file system cannot be built on this machine, with the reason and the fix."""


def cache_folder() -> Path:
    configured = os.environ.get("GPUBROKER_CLOUDS_CACHE")
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpubroker" / "clouds"


def trainer_requirements() -> str:
    script = CHECKOUT / "deploy" / "trainer_requirements.py"
    return subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout


def trainer_constraints() -> str:
    """Return the locked versions without hashes: this machine's torch may be another build of the same version."""
    text = (CHECKOUT / "constraints-trainer.txt").read_text()
    return re.sub(r" \\\n +--hash=\S+", "", text)


def recipe() -> str:
    """Return a digest of everything that determines the baked root file system."""
    digest = hashlib.sha256(f"{EDITION} {SUITE} {BASE} {PACKAGES} {trainer_requirements()}".encode())
    digest.update(PROVISION.read_bytes())
    digest.update(trainer_constraints().encode())
    return digest.hexdigest()[:16]


def mirror() -> str:
    """Return the address of this machine's apt mirror of Debian bookworm."""
    layout = "$(CREATED_BY)|$(CODENAME)|$(COMPONENT)|$(REPO_URI)"
    try:
        listing = subprocess.run(["apt-get", "indextargets", "--format", layout], capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise NoBake("no apt-get here: bake on Debian or Ubuntu") from None
    for line in listing.splitlines():
        if line.startswith(f"Packages|{SUITE}|main|"):
            return line.rpartition("|")[2]
    raise NoBake(f"apt knows no Debian {SUITE} here: add it to the apt sources, then run apt-get update")


def need_debootstrap() -> None:
    if os.geteuid() != 0:
        raise NoBake("the bake makes files of other owners: run it as root")
    if shutil.which("debootstrap"):
        return
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(["apt-get", "update"], **quiet)  # type: ignore[call-overload]
    subprocess.run(["apt-get", "install", "-y", "debootstrap"], **quiet)  # type: ignore[call-overload]
    if not shutil.which("debootstrap"):
        raise NoBake("debootstrap is missing and could not be installed: apt-get install debootstrap")


def index_settings() -> dict[str, str]:
    """Return uv's environment for the indexes that pip is configured with here, as `make venv` uses them."""
    code = "import json, install; print(json.dumps(install.uv_environment(install.pip_settings())))"
    env = os.environ | {"PYTHONPATH": str(CHECKOUT / ".ci")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, env=env, capture_output=True, text=True, check=True
    )
    merged: dict[str, str] = json.loads(done.stdout)
    return {k: v for k, v in merged.items() if k.startswith("UV_") or k == "SSL_CERT_FILE" or k.endswith("_proxy")}


def local_indexes(settings: Mapping[str, str]) -> list[Path]:
    """Return local folders that the settings name; an index lies next to the files that it points to."""
    links, indexes = (
        settings.get("UV_FIND_LINKS", ""),
        (settings.get("UV_INDEX", ""), settings.get("UV_DEFAULT_INDEX", "")),
    )
    folders = [Path(urlsplit(word).path) for word in links.split(",") if word.startswith(("/", "file:"))]
    folders += [Path(urlsplit(word).path).parent for word in " ".join(indexes).split() if word.startswith("file:")]
    return [folder for folder in folders if folder.exists()]


def enclosed(root: Path, argv: Sequence[str], env: Mapping[str, str], binds: Mapping[str, tuple[Path, bool]]) -> str:
    """Run `argv` in `root` with namespaces of its own, this host's network, and `binds` (inside: outside, read-only).

    Returns what it printed. Raises NoBake.
    """
    life_r, life_w = os.pipe()
    bound = [[str(outside), inside, read_only] for inside, (outside, read_only) in binds.items()]
    config = {"root": str(root), "network": "host", "binds": bound, "argv": list(argv), "env": dict(env),
              "life": life_r}  # fmt: skip
    try:
        done = subprocess.run([sys.executable, "-I", ENCLOSE, json.dumps(config)], pass_fds=[life_r], text=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    finally:
        os.close(life_r)
        os.close(life_w)
    if done.returncode != 0:
        raise NoBake(f"{argv[0]} failed in the root file system:\n{done.stdout[-3000:]}")
    return done.stdout


def bootstrap(root: Path, debs: Path, packages: Sequence[str] = PACKAGES) -> None:
    debs.mkdir(parents=True, exist_ok=True)
    command = ["debootstrap", "--foreign", "--variant=minbase", f"--cache-dir={debs}",
               f"--include={','.join(packages)}", SUITE, str(root), mirror()]  # fmt: skip
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise NoBake(f"debootstrap failed: {(done.stdout + done.stderr)[-2000:]}")
    env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive"}
    shutil.rmtree(root / "dev")
    for name in ("dev", "proc", "sys", "run"):
        (root / name).mkdir(exist_ok=True)
    enclosed(root, ["/bin/sh", "/debootstrap/debootstrap", "--second-stage"], env, {})


def provision(root: Path) -> None:
    """Create the users, and install what the trainer imports."""
    settings = index_settings()
    inputs = root / "bake"
    inputs.mkdir()
    shutil.copy(PROVISION, inputs / "inside.sh")
    (inputs / "constraints-trainer.txt").write_text(trainer_constraints())
    (inputs / "requirements.txt").write_text(trainer_requirements())
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        raise NoBake("uv is missing: python3 .ci/install.py uv")
    shutil.copy(uv, inputs / "uv")
    uv_cache = subprocess.run([uv, "cache", "dir"], capture_output=True, text=True, check=True).stdout.strip()
    Path(uv_cache).mkdir(parents=True, exist_ok=True)
    binds = {"/bake/cache": (Path(uv_cache), False), "/etc/resolv.conf": (Path("/etc/resolv.conf").resolve(), True)}
    binds |= {str(folder): (folder, True) for folder in local_indexes(settings)}
    certificates = Path(settings.pop("SSL_CERT_FILE", CERTIFICATES))
    if certificates.exists():
        binds["/bake/certificates.crt"] = (certificates, True)
        settings["SSL_CERT_FILE"] = "/bake/certificates.crt"
    env = settings | {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "UV_CACHE_DIR": "/bake/cache",
                      "UV_LINK_MODE": "copy", "LANG": "C.UTF-8"}  # fmt: skip
    enclosed(root, ["/bin/bash", "/bake/inside.sh"], env, binds)
    for leftover in (inputs, root / "etc" / "resolv.conf"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)
    _drop_mount_points(root, local_indexes(settings))


def _drop_mount_points(root: Path, folders: Sequence[Path]) -> None:
    """Remove the empty folders that the binds left behind."""
    for folder in folders:
        for outside in (folder, *folder.parents):
            inside = root / outside.relative_to("/")
            if (
                inside != root
                and inside.is_dir()
                and not any(inside.iterdir())
                and str(outside) not in ("/srv", "/opt")
            ):
                inside.rmdir()


def shift_owners(root: Path) -> int:
    """Change every file's owner to the owner's number plus BASE; return the bytes on disk."""
    size, seen = 0, set()
    for folder, folders, files in os.walk(root):
        for path in [folder, *(os.path.join(folder, n) for n in (*folders, *files))]:
            status = os.lstat(path)
            if status.st_ino in seen:
                continue
            seen.add(status.st_ino)
            size += status.st_blocks * 512
            os.lchown(path, status.st_uid + BASE, status.st_gid + BASE)
            if status.st_mode & 0o6000 and not os.path.islink(path):
                os.chmod(path, status.st_mode & 0o7777)  # chown takes set-user-id away
    return size


@contextmanager
def locked(path: Path, mode: int) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, mode)
        yield


def drop_old(cache: Path, keep: str) -> None:
    """Remove unfinished bakes, and other recipes' root file systems that no process uses."""
    for folder in cache.glob("*.partial"):
        shutil.rmtree(folder)
    for folder in cache.glob("????????????????"):
        if folder.name == keep or not (folder / "root").is_dir():
            continue
        try:
            with locked(cache / f"{folder.name}.lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(folder)
        except BlockingIOError:
            continue


def bake(*, force: bool = False, is_verbose: bool = False) -> Path:
    """Return the baked root file system, built first if it is not there. Raises NoBake."""
    cache, key = cache_folder(), recipe()
    with locked(cache / "bake.lock", fcntl.LOCK_EX):
        target = cache / key
        if (target / "root").is_dir() and not force:
            return target / "root"
        need_debootstrap()
        started = time.monotonic()
        partial = cache / f"{key}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        root = partial / "root"
        root.mkdir(parents=True)
        steps: dict[str, object] = {}
        bootstrap(root, cache / "debs")
        steps["debian_s"] = round(time.monotonic() - started, 1)
        provision(root)
        steps["bytes"] = shift_owners(root)
        steps["total_s"] = round(time.monotonic() - started, 1)
        (partial / "baked.json").write_text(json.dumps(steps))
        with locked(cache / f"{key}.lock", fcntl.LOCK_EX):
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
        drop_old(cache, key)
        if is_verbose:
            print(json.dumps(steps))
        return target / "root"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--force", action="store_true", help="build again what is built already")
    try:
        print(bake(force=parser.parse_args().force, is_verbose=True))
    except NoBake as e:
        sys.exit(f"bake: {e}")


if __name__ == "__main__":
    main()

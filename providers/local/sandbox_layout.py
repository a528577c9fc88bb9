"""Paths that an isolated machine sees: programs, devices, model folders and its job's part of the blob store."""

import glob
import importlib.util
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from broker.domain.errors import Rejected
from broker.domain.instance import HostIsolation
from providers.local.sandbox import SandboxMount
from trainer.contract import object_keys

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/sys")
_ETC = (
    "passwd", "group", "hosts", "host.conf", "resolv.conf", "nsswitch.conf", "gai.conf", "protocols", "services",
    "localtime", "timezone", "mime.types", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "ssl/certs",
    "ssl/openssl.cnf", "ca-certificates", "pki/tls/certs", "pki/ca-trust", "OpenCL", "vulkan",
)  # fmt: skip
"""Entries of /etc that programs need. The others may hold the daemon's configuration and keys."""
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_GPUS = ("/dev/nvidia*", "/dev/kfd", "/dev/dri")
_OPERATOR_FILES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
_PACKAGES = ("trainer", "providers")
MAX_CHECKED = 10_000
STORE = "/run/gpubroker/blobs"
"""Folder of a blob store in the sandbox. It is below no folder in which the job may create links."""


def package_parents() -> list[str]:
    """Return the folders from which a sandbox imports this program's packages."""
    folders = [str(folder.parent) for folder in _package_folders()]
    return list(dict.fromkeys([*folders, *_installed_packages()]))


def root_links() -> dict[str, str]:
    """Return the symbolic links of the host's root folder to its programs, such as /bin."""
    return {path: os.readlink(path) for path in _SYSTEM if os.path.islink(path)}


def gpu_groups() -> list[int]:
    """Return the groups that own GPU devices which other users may not open."""
    statuses = [os.stat(path) for pattern in (*_GPUS, "/dev/dri/*") for path in glob.glob(pattern)]
    groups = {s.st_gid for s in statuses if stat.S_ISCHR(s.st_mode) and not s.st_mode & 0o006}
    return sorted(groups - {0})


def unreadable(roots: Iterable[Path]) -> Path | None:
    """Return the first file or folder below the roots that other users of this host cannot read.

    Only the first MAX_CHECKED entries are checked.
    """
    left = MAX_CHECKED
    for root in roots:
        for folder, _, files in os.walk(root):
            for path in (Path(folder), *(Path(folder, name) for name in files)):
                needed = stat.S_IROTH | stat.S_IXOTH if path.is_dir() else stat.S_IROTH
                if path.exists() and path.stat().st_mode & needed != needed:
                    return path
                left -= 1
                if not left:
                    return None
    return None


def common_mounts(hidden: Iterable[Path], readable: Iterable[Path]) -> list[SandboxMount]:
    """Return the mounts of every machine. `hidden`: folders that stay empty even if a shown folder contains them."""
    visible_paths = [Path(path) for path in _SYSTEM if os.path.exists(path) and not os.path.islink(path)]
    visible_paths += [Path("/etc", name) for name in _ETC]
    visible_paths += [*_python_folders(), *_package_folders(), *_operator_paths(), *readable]
    mounts = [mount for path in visible_paths for mount in _both_paths(path)]
    mounts += [_mount(target, None) for path in hidden for target in {str(path.absolute()), os.path.realpath(path)}]
    devices = [f"/dev/{name}" for name in _DEVICES]
    devices += [path for pattern in _GPUS for path in glob.glob(pattern)]
    return mounts + [_mount(path, path, "device") for path in devices if os.path.exists(path)]


def store_mounts(isolation: HostIsolation, env: Mapping[str, str]) -> list[SandboxMount]:
    """Return the mounts of the job's part of a blob store that is a folder; a bucket has credentials instead.

    Creates the folders that the agent writes to, but never the store. Raises Rejected.
    """
    url = env.get("GPUBROKER_BLOBS", "")
    if not url.startswith("file:"):
        return []
    installation = env["GPUBROKER_INSTALLATION"]
    store = Path(unquote(urlsplit(url).path)).resolve() / installation
    if not store.is_dir():
        raise Rejected(f"{store}: the blob store is absent; put it back")
    attempt = env["GPUBROKER_ATTEMPT"]
    own = object_keys.checkpoints(isolation.job)
    writable = (f"attempts/{attempt}", f"{object_keys.HEARTBEATS}{attempt}", f"{own}{attempt}")
    for key in writable:
        (store / key).mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            (store / key).chmod(0o1777)  # the folders above are private; the job may not replace the broker's files
    origins = [] if isolation.origin is None else [object_keys.checkpoints(isolation.origin)]
    data = [f"{object_keys.JOB_DATA}{path.name}" for path in (store / object_keys.JOB_DATA).glob(f"{isolation.job}.*")]
    read = [os.path.dirname(object_keys.BROKER_LEASE), object_keys.spec(attempt), own, *origins, *data]
    inside = Path(STORE, installation)
    mounts = [_mount(str(inside / key), str(store / key)) for key in read if (store / key).exists()]
    # The specification is a mount of its own, so that the job cannot replace it.
    return mounts + [_mount(str(inside / key), str(store / key), "write") for key in writable]


def in_order(mounts: Iterable[SandboxMount]) -> list[SandboxMount]:
    """Return the mounts with every folder before the paths below it. Of equal targets a hidden folder wins."""
    by_target: dict[str, SandboxMount] = {}
    for mount in mounts:
        if mount["target"] not in by_target or mount["source"] is None:
            by_target[mount["target"]] = mount
    return sorted(by_target.values(), key=lambda mount: Path(mount["target"]).parts)


def writable(folder: Path) -> SandboxMount:
    """Return the mount of a folder of the machine itself."""
    return _mount(str(folder), str(folder), "write")


def _mount(target: str, source: str | None, kind: Literal["read", "write", "device"] = "read") -> SandboxMount:
    return SandboxMount(target=target, source=source, kind=kind)


def _both_paths(path: Path) -> Iterator[SandboxMount]:
    """Yield mounts at a path and at its real path, because programs may name either. An unreadable path yields none."""
    if os.access(path, os.R_OK):
        real = os.path.realpath(path)
        for target in {str(path.absolute()), real}:
            yield _mount(target, real)


def _python_folders() -> Sequence[Path]:
    """Return the folders of the interpreter and of its installed packages."""
    return [Path(path) for path in (sys.prefix, sys.base_prefix, *_installed_packages())]


def _installed_packages() -> list[str]:
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


def _package_folders() -> list[Path]:
    specs = [importlib.util.find_spec(name) for name in _PACKAGES]
    return [Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()]


def _operator_paths() -> list[Path]:
    """Return libraries and certificates that the daemon's environment names."""
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    named = [*libraries, *(os.environ.get(name, "") for name in _OPERATOR_FILES)]
    return [Path(path) for path in named if path.startswith("/") and path != "/"]

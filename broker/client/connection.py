"""Where the daemon is, and the token for it: found, stored and forgotten. Files are 0600.

Order: `GPUBROKER_URL` (with `GPUBROKER_TOKEN`), `client.json` of a `GPUBROKER_HOME` that is set, the stored login,
`client.json` of the default home. The daemon writes `client.json` when it starts; `gpubroker login` stores a login.
"""

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from broker.config import CLIENT_FILE, default_home


@dataclass(frozen=True, kw_only=True)
class Connection:
    """A daemon's address and what opens it; `source` says where they were found."""

    url: str
    token: str = field(default="", repr=False)
    source: str = ""
    certificate: str = ""
    """File of the daemon's own certificate, which is trusted; empty: what this machine trusts."""


def login_file() -> Path:
    """Where `gpubroker login` keeps the daemon of this person."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "gpubroker" / "login.json"


def local_file() -> Path:
    """Where a daemon of this machine leaves its address."""
    return default_home() / CLIENT_FILE


def find() -> Connection | None:
    """The daemon that commands talk to; None when none was ever started or logged in to."""
    url, token = os.environ.get("GPUBROKER_URL"), os.environ.get("GPUBROKER_TOKEN")
    if url:
        return Connection(url=url.rstrip("/"), token=token or "", source="GPUBROKER_URL")
    chosen = "GPUBROKER_HOME" in os.environ
    places = (local_file(), login_file()) if chosen else (login_file(), local_file())
    found = next((c for c in map(_read, places) if c is not None), None)
    return replace(found, token=token) if found and token else found


def write(path: Path, connection: Connection) -> None:
    """Replaces the file at once; nobody but its owner ever can read it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({k: v for k, v in asdict(connection).items() if k != "source"}, file)
    beside.replace(path)


def _read(path: Path) -> Connection | None:
    try:
        data = json.loads(path.read_text())
        return Connection(
            url=str(data["url"]).rstrip("/"),
            token=str(data.get("token", "")),
            source=str(path),
            certificate=str(data.get("certificate") or ""),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None

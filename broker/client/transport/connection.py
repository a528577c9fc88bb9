"""Finds, checks and stores the address and token of the daemon. Files have mode 0600.

Order: `GPUBROKER_URL` (with `GPUBROKER_TOKEN`), `client.json` of a `GPUBROKER_HOME` that is set, the stored login,
`client.json` of the default home. The daemon writes `client.json` when it starts; `gpubroker login` stores a login.
"""

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from broker.client.transport.errors import Misconfigured
from broker.paths import CLIENT_FILE, default_home


@dataclass(frozen=True, kw_only=True)
class Connection:
    """Address of a daemon and its token. `source`: name of the setting or file that contains the address."""

    url: str
    token: str = field(default="", repr=False)
    source: str = ""
    certificate: str = ""
    """File of the daemon's own certificate to trust; empty: trust this machine's certificates."""


def login_file() -> Path:
    """Return the file in which `gpubroker login` stores the user's daemon."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "gpubroker" / "login.json"


def local_file() -> Path:
    """Return the file in which a daemon of this machine stores its address."""
    return default_home() / CLIENT_FILE


def find() -> Connection | None:
    """Return the daemon to use, or None if no daemon was ever started or logged in to. Raises Misconfigured."""
    url, token = os.environ.get("GPUBROKER_URL"), bearer(os.environ.get("GPUBROKER_TOKEN", ""), "GPUBROKER_TOKEN")
    if url:
        return Connection(url=address(url, "GPUBROKER_URL"), token=token, source="GPUBROKER_URL")
    has_home = "GPUBROKER_HOME" in os.environ
    places = (local_file(), login_file()) if has_home else (login_file(), local_file())
    stored = next((c for c in map(_stored_connection, places) if c is not None), None)
    return replace(stored, token=token) if stored and token else stored


def address(url: str, where: str) -> str:
    """Return an address without its final slash. Raises Misconfigured, which names the source `where`."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and url.isprintable()
    except ValueError:  # a port that is not a number, or an unclosed bracket
        usable = False
    if not usable:
        raise Misconfigured(f"{where}: {url!r} is not an address; write http://host:port or https://host")
    return url.rstrip("/")


def bearer(token: str, where: str) -> str:
    """Return a token unchanged. Raises Misconfigured, which names the source `where`, if it cannot be in a header."""
    if not token.isprintable():
        raise Misconfigured(f"{where}: the token has a line break or the like in it; give the token alone")
    return token


def write(path: Path, connection: Connection) -> None:
    """Replace the file atomically; only its owner can ever read it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({k: v for k, v in asdict(connection).items() if k != "source"}, file)
    beside.replace(path)


def _stored_connection(path: Path) -> Connection | None:
    """Return the stored connection, or None if the file does not exist. Raises Misconfigured if it is unreadable.

    An unreadable file is an error, because using another daemon instead would be wrong.
    """
    fix = "run `gpubroker login URL` again" if path == login_file() else "start the daemon again, which writes it"
    try:
        data = json.loads(path.read_text())
        return Connection(
            url=address(str(data["url"]), str(path)),
            token=bearer(str(data.get("token", "")), str(path)),
            source=str(path),
            certificate=str(data.get("certificate") or ""),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        raise Misconfigured(f"{path} cannot be read ({e.strerror}); {fix}") from None
    except (ValueError, KeyError, TypeError, Misconfigured):
        raise Misconfigured(f"{path} is damaged; {fix}") from None

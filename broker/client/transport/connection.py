"""Where the daemon is, and the token for it: found, stored and forgotten. Files are 0600.

Order: `GPUBROKER_URL` (with `GPUBROKER_TOKEN`), `client.json` of a `GPUBROKER_HOME` that is set, the stored login,
`client.json` of the default home. The daemon writes `client.json` when it starts; `gpubroker login` stores a login.
"""

import json
import os
import ssl
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from broker.client.transport.errors import Misconfigured
from broker.paths import CLIENT_FILE, default_home

CERTIFICATE_END = "-----END CERTIFICATE-----\n"


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
    """The daemon that commands talk to; None when none was ever started or logged in to. Raises Misconfigured."""
    url, token = os.environ.get("GPUBROKER_URL"), bearer(os.environ.get("GPUBROKER_TOKEN", ""), "GPUBROKER_TOKEN")
    if url:
        return Connection(url=address(url, "GPUBROKER_URL"), token=token, source="GPUBROKER_URL")
    chosen = "GPUBROKER_HOME" in os.environ
    places = (local_file(), login_file()) if chosen else (login_file(), local_file())
    found = next((c for c in map(_read, places) if c is not None), None)
    return replace(found, token=token) if found and token else found


def address(said: str, where: str) -> str:
    """Without a slash at its end. Raises Misconfigured, which names `where` it was given."""
    try:
        parts = urlsplit(said)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and said.isprintable()
    except ValueError:  # a port that is no number, a bracket that is not closed
        usable = False
    if not usable:
        raise Misconfigured(f"{where}: {said!r} is no address; write http://host:port or https://host")
    return said.rstrip("/")


def bearer(said: str, where: str) -> str:
    """As it is. Raises Misconfigured, which names `where` it was given, for what no header can carry."""
    if not said.isprintable():
        raise Misconfigured(f"{where}: the token has a line break or the like in it; give the token alone")
    return said


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
    """None where it is absent. Raises Misconfigured where it is there: another daemon is not what was meant."""
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


def trusting(certificate: str) -> ssl.SSLContext:
    """Return a TLS context that trusts exactly the first certificate in a file, whatever its issuer and name.

    Used for the certificate of this machine's own daemon. Raises OSError, ssl.SSLError.
    """
    path = Path(certificate)
    return _context(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _context(path: Path, changed: int) -> ssl.SSLContext:
    """Return the same object for an unchanged file, so that connections are reused."""
    certificate = path.read_text().partition(CERTIFICATE_END)[0]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the daemon listens on loopback, and its certificate names another host
    context.load_verify_locations(cadata=certificate + CERTIFICATE_END)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context

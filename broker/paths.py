"""Locations of files that the daemon and the client share, and trust in the daemon's certificate."""

import os
import ssl
from functools import lru_cache
from pathlib import Path

CONFIG_FILE = "gpubroker.yaml"
CLIENT_FILE = "client.json"


CERTIFICATE_END = "-----END CERTIFICATE-----\n"


def default_home() -> Path:
    """Return `$GPUBROKER_HOME`, or by default the XDG state folder of this user."""
    if home := os.environ.get("GPUBROKER_HOME"):
        return Path(home).expanduser().absolute()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "gpubroker"


def trusting(certificate: str) -> ssl.SSLContext:
    """Return a TLS context that trusts exactly the first certificate in a file, regardless of issuer and name.

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

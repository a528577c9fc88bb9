"""Trust in the certificate of this machine's own daemon, whoever signed it and whatever name it is for."""

import ssl
from functools import lru_cache
from pathlib import Path

END = "-----END CERTIFICATE-----\n"


def trusting(certificate: str) -> ssl.SSLContext:
    """Trusts exactly the first certificate of that file, as it is now. Raises OSError, ssl.SSLError."""
    path = Path(certificate)
    return _context(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _context(path: Path, changed: int) -> ssl.SSLContext:
    """The same object for the same file, so that connections are used again."""
    own = path.read_text().partition(END)[0]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # it listens on loopback, and is named for others
    context.load_verify_locations(cadata=own + END)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context

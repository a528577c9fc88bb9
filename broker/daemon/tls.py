"""TLS certificate of the HTTP and gRPC APIs; a renewed file is used from the next handshake on."""

import logging
import ssl
import threading
from pathlib import Path

from broker.domain.errors import InvalidInput, Problem

log = logging.getLogger(__name__)
Stamp = tuple[tuple[int, int, int], ...]


class Certificate:
    """A certificate chain and its key, read again when a file changes. Thread-safe.

    If the changed files cannot be used, the previous certificate and key stay in use.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        """Load both files. Raises InvalidInput naming the file."""
        self._paths = (certificate, key)
        self._lock = threading.Lock()
        try:
            self._stamp = self._read_stamp()
            self._load()
        except OSError as error:
            message = f"{error.filename or certificate}: {error.strerror or error}; give a readable PEM file"
            raise InvalidInput(Problem(field="tls", message=message)) from None

    def _read_stamp(self) -> Stamp:
        stats = (path.stat() for path in self._paths)
        return tuple((s.st_mtime_ns, s.st_size, s.st_ino) for s in stats)

    def _load(self) -> None:
        chain, key = self._paths
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(chain, key, password=_no_password)
        except ssl.SSLError as error:
            message = f"{chain} and {key} are not a certificate and its key in PEM without a password ({error.reason})"
            raise InvalidInput(Problem(field="tls", message=message)) from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.sni_callback = self._renew
        self._pem = (key.read_bytes(), chain.read_bytes())
        self._context = context

    def _refresh(self) -> None:
        try:
            stamp = self._read_stamp()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._load()
            log.info("loaded the renewed certificate")
        except (OSError, InvalidInput) as error:
            log.warning("the changed certificate cannot be used, so the previous one stays in use: %s", error)

    def context(self) -> ssl.SSLContext:
        """Return the context of a listening socket."""
        with self._lock:
            self._refresh()
            return self._context

    def _renew(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Select the context at each handshake; OpenSSL calls it even if the client names no host."""
        current = self.context()
        if current is not context:
            connection.context = current

    def pem(self) -> tuple[bytes, bytes]:
        """Return the current key and chain."""
        with self._lock:
            self._refresh()
            return self._pem


def _no_password() -> str:
    """Return an empty password; without this callback OpenSSL asks for one on the terminal."""
    return ""

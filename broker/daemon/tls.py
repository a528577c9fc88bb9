"""The daemon's own certificate, for both doors; a renewed file is used from the next handshake on."""

import logging
import ssl
import threading
from pathlib import Path

from broker.domain.errors import InvalidInput, Problem

log = logging.getLogger(__name__)
Stamp = tuple[tuple[int, int, int], ...]


class Certificate:
    """A chain and its key, read again when a file changes; of a pair that does not match, the one before stays in use.

    Safe to use from several threads.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises InvalidInput naming the file."""
        self._paths = (certificate, key)
        self._lock = threading.Lock()
        try:
            self._stamp = self._look()
            self._load()
        except OSError as error:
            message = f"{error.filename or certificate}: {error.strerror or error}; give a readable PEM file"
            raise InvalidInput(Problem(field="tls", message=message)) from None

    def _look(self) -> Stamp:
        found = (path.stat() for path in self._paths)
        return tuple((s.st_mtime_ns, s.st_size, s.st_ino) for s in found)

    def _load(self) -> None:
        chain, key = self._paths
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(chain, key, password=_no_password)
        except ssl.SSLError as error:
            message = f"{chain} and {key} are no certificate and its key in PEM, without a password ({error.reason})"
            raise InvalidInput(Problem(field="tls", message=message)) from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.sni_callback = self._renew
        self._pem = (key.read_bytes(), chain.read_bytes())
        self._context = context

    def _refresh(self) -> None:
        try:
            stamp = self._look()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._load()
            log.info("the certificate was read again")
        except (OSError, InvalidInput) as error:
            log.warning("the certificate changed and cannot be used, so the one before stays: %s", error)

    def context(self) -> ssl.SSLContext:
        """For a listening socket."""
        with self._lock:
            self._refresh()
            return self._context

    def _renew(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """At each handshake; OpenSSL calls it also where the client names no host."""
        current = self.context()
        if current is not context:
            connection.context = current

    def pem(self) -> tuple[bytes, bytes]:
        """(key, chain) as they are now."""
        with self._lock:
            self._refresh()
            return self._pem


def _no_password() -> str:
    """Else OpenSSL asks on the terminal."""
    return ""

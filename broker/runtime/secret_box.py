"""Encryption of stored secrets and of the credentials that are sent to attempts.

An installation has one master key. Keys for each purpose are derived by HKDF-SHA256 (RFC 5869). The key that a rented
machine receives therefore opens the grant of its attempt only.
"""

import base64
import binascii
import os
from collections.abc import Mapping
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from broker.domain.errors import GpubrokerError
from broker.ports import Store
from trainer.contract.documents import Sealed

MASTER_KEY_VARIABLE = "GPUBROKER_MASTER_KEY"
MASTER_KEY_FILE = "master.key"
"""Name of the key file in the home."""
KEY_BYTES = 32
MARK_LENGTH = 16


class SecretsError(GpubrokerError):
    """Raised if the master key is missing, malformed, or not the key that sealed a value."""


class SecretBox:
    """Encrypts and decrypts with keys derived from the master key."""

    def __init__(self, master_key: bytes) -> None:
        """Derive the keys from `master_key`, 32 random bytes."""
        if len(master_key) != KEY_BYTES:
            raise SecretsError(f"the master key has {len(master_key)} bytes; it must have {KEY_BYTES}")
        self._master = master_key
        self._at_rest = Fernet(self._derive(b"gpubroker secrets at rest"))

    def __repr__(self) -> str:
        return "SecretBox(...)"

    def _derive(self, info: bytes) -> bytes:
        raw = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(self._master)
        return base64.urlsafe_b64encode(raw)

    @property
    def mark(self) -> str:
        """Return the mark that identifies the master key without revealing it."""
        return self._derive(b"gpubroker mark of the master key").decode()[:MARK_LENGTH]

    def seal(self, value: str) -> bytes:
        """Return the encrypted value that the database stores."""
        return self._at_rest.encrypt(value.encode())

    def open(self, sealed: bytes) -> str:
        """Return the decrypted value. Raises SecretsError if another master key sealed it."""
        try:
            return self._at_rest.decrypt(sealed).decode()
        except InvalidToken:
            raise SecretsError(
                f"a stored secret does not open with this master key; restore the key file or {MASTER_KEY_VARIABLE}, "
                "or set the secret again"
            ) from None

    def session_key(self) -> bytes:
        """Return the Fernet key of the browsers' session cookies."""
        return self._derive(b"gpubroker web sessions")

    def attempt_key(self, attempt_id: str) -> bytes:
        """Return the Fernet key that the attempt's machine receives at launch."""
        return self._derive(b"gpubroker attempt " + attempt_id.encode())

    def open_for(self, attempt_id: str, sealed: str) -> Sealed:
        """Return the content that `seal_for` sealed. Raises SecretsError if another master key sealed it."""
        try:
            return Sealed.model_validate_json(Fernet(self.attempt_key(attempt_id)).decrypt(sealed))
        except (InvalidToken, ValueError):
            raise SecretsError(f"the grant of attempt {attempt_id} does not open with this master key") from None

    def seal_for(self, attempt_id: str, content: Sealed) -> str:
        """Return `Grant.sealed`, which opens with the attempt's key only."""
        return Fernet(self.attempt_key(attempt_id)).encrypt(content.model_dump_json().encode()).decode()


async def sealing(store: Store, path: Path, environ: Mapping[str, str]) -> SecretBox:
    """Return the SecretBox for the secrets of the database; a master key is created only for a new database.

    Raises SecretsError if the key is missing, or is not the key that sealed the secrets.
    """
    stored_mark = await store.master_key(None)
    if stored_mark and not environ.get(MASTER_KEY_VARIABLE) and not path.exists():
        raise SecretsError(f"the master key that sealed this database's secrets is missing: {_fix(path)}")
    box = SecretBox(master_key(path, environ))
    if await store.master_key(box.mark) != box.mark:
        raise SecretsError(f"the master key is not the one that sealed this database's secrets: {_fix(path)}")
    return box


def _fix(path: Path) -> str:
    return f"restore {path} or {MASTER_KEY_VARIABLE}, the same for all brokers; if it is lost: gpubroker key adopt"


def master_key(path: Path, environ: Mapping[str, str]) -> bytes:
    """Return the key of the environment (urlsafe base64), or of the file, which is created with mode 0600 if missing.

    Raises SecretsError for a malformed key, or a file that others can read.
    """
    text = environ.get(MASTER_KEY_VARIABLE)
    if text:
        return _decode(text.encode(), MASTER_KEY_VARIABLE)
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return _create(path)
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            raise SecretsError(f"{path}: others can read the master key; run chmod 600 on it")
        return _decode(file.read(), str(path))


def _create(path: Path) -> bytes:
    """Create the key file as a link to a complete draft, and return the key.

    A crash therefore leaves no partial key. Of two concurrent starts, the second one uses the first one's key.
    """
    key = os.urandom(KEY_BYTES)
    draft = path.with_name(f"{path.name}.{os.urandom(4).hex()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(base64.urlsafe_b64encode(key) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(draft, path)
    except FileExistsError:
        return _decode(path.read_bytes(), str(path))
    finally:
        draft.unlink()
    return key


def _decode(text: bytes, where: str) -> bytes:
    try:
        key = base64.b64decode(text.strip(), altchars=b"-_", validate=True)
    except binascii.Error:
        raise SecretsError(f"{where}: not base64; give {KEY_BYTES} bytes as urlsafe base64") from None
    if len(key) != KEY_BYTES:
        raise SecretsError(f"{where}: {len(key)} bytes; give {KEY_BYTES} bytes as urlsafe base64")
    return key

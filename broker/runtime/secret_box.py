"""Secrets at rest and on their way to an attempt.

One master key per installation. Keys for each purpose are derived by HKDF-SHA256 (RFC 5869), so that an attempt's key,
which is given to a rented machine, opens that attempt's grant and nothing else.
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
"""In the home."""
KEY_BYTES = 32
MARK_LENGTH = 16


class SecretsError(GpubrokerError):
    """The master key is missing, malformed, or not the one that sealed a value."""


class SecretBox:
    """Seals and opens with keys derived from the master key."""

    def __init__(self, master_key: bytes) -> None:
        """`master_key`: 32 random bytes."""
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
        """Which master key this is; it tells nothing of the key."""
        return self._derive(b"gpubroker mark of the master key").decode()[:MARK_LENGTH]

    def seal(self, value: str) -> bytes:
        """What the database stores."""
        return self._at_rest.encrypt(value.encode())

    def open(self, sealed: bytes) -> str:
        """Raises SecretsError when another master key sealed it."""
        try:
            return self._at_rest.decrypt(sealed).decode()
        except InvalidToken:
            raise SecretsError(
                f"a stored secret does not open with this master key; restore the key file or {MASTER_KEY_VARIABLE}, "
                "or set the secret again"
            ) from None

    def attempt_key(self, attempt_id: str) -> bytes:
        """The Fernet key that an attempt's machine is given at launch."""
        return self._derive(b"gpubroker attempt " + attempt_id.encode())

    def open_for(self, attempt_id: str, sealed: str) -> Sealed:
        """What `seal_for` sealed. Raises SecretsError when another master key sealed it."""
        try:
            return Sealed.model_validate_json(Fernet(self.attempt_key(attempt_id)).decrypt(sealed))
        except (InvalidToken, ValueError):
            raise SecretsError(f"the grant of attempt {attempt_id} does not open with this master key") from None

    def seal_for(self, attempt_id: str, content: Sealed) -> str:
        """`Grant.sealed`: opens with the attempt's key only."""
        return Fernet(self.attempt_key(attempt_id)).encrypt(content.model_dump_json().encode()).decode()


async def sealing(store: Store, path: Path, environ: Mapping[str, str]) -> SecretBox:
    """Of the database's secrets, by the master key as `master_key` has it, which is made for a new database alone.

    Raises SecretsError where it is not the one that they are sealed by.
    """
    known = await store.master_key(None)
    if known and not environ.get(MASTER_KEY_VARIABLE) and not path.exists():
        raise SecretsError(f"the master key is missing, by which this database's secrets are sealed: {_fix(path)}")
    box = SecretBox(master_key(path, environ))
    if await store.master_key(box.mark) != box.mark:
        raise SecretsError(f"the master key is not the one that this database's secrets are sealed by: {_fix(path)}")
    return box


def _fix(path: Path) -> str:
    return f"restore {path} or {MASTER_KEY_VARIABLE}, the same for all brokers; if it is lost: gpubroker key adopt"


def master_key(path: Path, environ: Mapping[str, str]) -> bytes:
    """The key of the environment (urlsafe base64), or of the file, which is created with mode 0600 when absent.

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
    """Written aside and linked into place: a crash leaves no half key, and of two starters one wins."""
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

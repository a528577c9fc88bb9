"""SSH host keys that machines get with their user data. Only AWS's machines get user data from SkyPilot.

cloud-init installs the key before sshd starts, and generates no other. The public key is pinned for all machines of the
attempt, so that even the first contact is checked.
"""

import os
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from .ssh import ANY_HOST, known_hosts_file

CLOUD_CONFIG = "#cloud-config"


def user_data_with_host_key(user_data: str, state: Path, cluster: str) -> str:
    """Return the user data with a fresh host key, which is pinned for the cluster.

    User data that is not a cloud-config, or that has keys, is returned unchanged. No file gets the private key.
    """
    lines = user_data.splitlines()
    if lines[:1] != [CLOUD_CONFIG] or any(line.startswith("ssh_keys:") for line in lines):
        return user_data
    key = Ed25519PrivateKey.generate()
    openssh, no_password = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, openssh, no_password).decode()
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
    _pin(known_hosts_file(state, cluster), public)
    indented = "".join(f"    {line}\n" for line in private.splitlines())
    return "\n".join([*lines, "ssh_keys:", f"  ed25519_public: {public}", "  ed25519_private: |", indented])


def _pin(path: Path, public: str) -> None:
    """Pin a key for every address. Replaces an earlier key of the name, because its machine was not created."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
        file.write(f"{ANY_HOST}{public}\n")
    os.replace(fresh, path)

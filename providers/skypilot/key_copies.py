"""Copies of the clouds' keys in the home of the daemon's own SkyPilot server, updated when the user changes a key."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from broker.runtime.private_files import write_private
from providers.common.credentials import sky_leftovers

ReadKeys = Callable[[], Mapping[str, Mapping[str, bytes]]]
"""Function that returns credential files by cloud and by path relative to a home folder.

The files of a cloud that is missing in the result stay unchanged.
"""


class KeyCopies:
    """Credential files that are rewritten when their source has changed.

    SkyPilot reads them at each request: see `providers.skypilot.plugin.patches`.
    """

    def __init__(self, home: Path, read_keys: ReadKeys) -> None:
        self._home, self._read = home, read_keys
        self._written: dict[str, Mapping[str, bytes]] = {}
        self.secrets: set[str] = set()
        """Words of all files written by this process that may be secrets."""

    def refresh(self) -> None:
        for cloud, files in self._read().items():
            if self._written.get(cloud) == files:
                continue
            for name, content in files.items():
                self.secrets.update(possible_secrets(content))
                write_private(self._home / name, content)
            for path in sky_leftovers(cloud, self._home, files):
                path.unlink(missing_ok=True)
            self._written[cloud] = dict(files)


def possible_secrets(content: bytes) -> list[str]:
    """Return the words of a credential file that may be secrets: those of at least 12 characters."""
    return re.findall(r"[^\s\"',=]{12,}", content.decode("utf-8", "replace"))

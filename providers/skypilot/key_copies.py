"""The clouds' keys in the home of the daemon's own SkyPilot server: as they are now, not as they were at its start."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from broker.runtime.private_files import write_private
from providers.common.credentials import sky_leftovers

ReadKeys = Callable[[], Mapping[str, Mapping[str, bytes]]]
"""Credential files by cloud and path relative to a home; a cloud that is left out keeps the ones that it has."""


class KeyCopies:
    """Made anew when their source changed. SkyPilot reads them at each request: see
    `providers.skypilot.plugin.fresh_keys`.
    """

    def __init__(self, home: Path, read: ReadKeys) -> None:
        self._home, self._read = home, read
        self._written: dict[str, Mapping[str, bytes]] = {}
        self.words: set[str] = set()
        """What of all that was ever written may be a secret."""

    def refresh(self) -> None:
        for cloud, files in self._read().items():
            if self._written.get(cloud) == files:
                continue
            for name, content in files.items():
                self.words.update(words_of(content))
                write_private(self._home / name, content)
            for path in sky_leftovers(cloud, self._home, files):
                path.unlink(missing_ok=True)
            self._written[cloud] = dict(files)


def words_of(text: bytes) -> list[str]:
    """What in credentials may be a secret: every word of some length."""
    return re.findall(r"[^\s\"',=]{12,}", text.decode("utf-8", "replace"))

"""Writes a file completely or not at all."""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from broker.client.transport.errors import NotSaved


@contextmanager
def placed(target: Path) -> Iterator[BinaryIO]:
    """Open a temporary file next to `target`. It replaces `target` when the body succeeds, otherwise it is removed.

    The file is flushed to disk first. Raises NotSaved.
    """
    part = target.with_name(f".gpubroker-{secrets.token_hex(4)}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "free space there, or name a folder elsewhere" if full else "name a folder that you can write"
        raise NotSaved(f"{target}: {e.strerror or e}; {fix}") from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)

"""Long barrier for work of unequal length, such as tokenising rows, or writing and merging results in one process.

A collective would time out, because the difference may be minutes or hours. Each process therefore sends heartbeats
through the store of the process group, and the others wait as long as heartbeats arrive.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d

from trainer.parallel import ddp

BEAT_S = 2.0
POLL_S = 0.2
SILENT_S = ddp.TIMEOUT.total_seconds()
"""Seconds without a heartbeat after which a process counts as lost."""
TIMEOUT_S = 12 * 3600.0
"""Longest wait for a process that still sends heartbeats, because it may hang. Seconds."""
_numbers = itertools.count()
"""Numbers of barriers. All processes enter each barrier, so a barrier has the same number in each process."""


@contextlib.contextmanager
def long_barrier(purpose: str) -> Iterator[None]:
    """Let each process do its work in the block, then wait for the others.

    All processes must enter the barrier. Raises DistError if another process is lost or failed.
    """
    if not distributed.is_initialized():
        yield
        return
    store, rank, over = distributed_c10d._get_default_store(), distributed.get_rank(), threading.Event()
    place = f"{purpose}-{next(_numbers)}"
    beats = threading.Thread(target=_beat, args=(store, f"{place}/alive/{rank}", over), daemon=True)
    beats.start()
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):
            store.set(f"{place}/failed/{rank}", "")
        raise
    finally:
        over.set()
        beats.join()
    store.set(f"{place}/done/{rank}", "")
    for other in range(distributed.get_world_size()):
        _await(store, place, purpose, other)


def _beat(store: Any, key: str, over: threading.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the store is gone; a process that waits at the barrier fails by itself
        while not over.is_set():
            store.add(key, 1)
            over.wait(BEAT_S)


def _await(store: Any, place: str, purpose: str, rank: int) -> None:
    """Wait until the process is done, as long as it sends heartbeats."""
    began = last_beat_at = time.monotonic()
    beats = 0
    while not store.check([f"{place}/done/{rank}"]):
        now, count = time.monotonic(), store.add(f"{place}/alive/{rank}", 0)
        if count != beats:
            beats, last_beat_at = count, now
        if store.check([f"{place}/failed/{rank}"]):
            raise distributed.DistStoreError(f"process {rank} failed while preparing its {purpose}")
        if now - last_beat_at > SILENT_S or now - began > TIMEOUT_S:
            message = (
                f"process {rank}, which prepares its {purpose}, sent its last heartbeat {now - last_beat_at:.0f} s ago"
            )
            raise distributed.DistStoreError(f"{message}; the others have waited for {now - began:.0f} s")
        time.sleep(POLL_S)

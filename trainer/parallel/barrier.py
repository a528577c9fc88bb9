"""Where processes wait for each other although each takes a time of its own: one machine has tokenised its rows minutes
or hours before another one, and the results of a large model are written and merged by one process alone.

A collective would give up meanwhile. So each process that is still at it says by the store of the process group that it
lives, and is waited for as long as it does.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d

from trainer.parallel import ddp as parallel

BEAT_S = 2.0
LOOK_S = 0.2
SILENT_S = parallel.TIMEOUT.total_seconds()
"""After which one that does not say that it lives is given up."""
PATIENCE_S = 12 * 3600.0
"""Also with one that lives: it may hang."""
_numbers = itertools.count()
"""Of meetings: each is entered by all, so all count alike."""


@contextlib.contextmanager
def long_barrier(what: str) -> Iterator[None]:
    """Around what each process does by itself; entered by all. Raises DistError where another one has gone."""
    if not distributed.is_initialized():
        yield
        return
    store, rank, over = distributed_c10d._get_default_store(), distributed.get_rank(), threading.Event()
    place = f"{what}-{next(_numbers)}"
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
        _await(store, place, what, other)


def _beat(store: Any, key: str, over: threading.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the store has gone: whoever waits for it sees that itself
        while not over.is_set():
            store.add(key, 1)
            over.wait(BEAT_S)


def _await(store: Any, place: str, what: str, rank: int) -> None:
    """Until the process is done, as long as it lives."""
    began = heard = time.monotonic()
    beats = 0
    while not store.check([f"{place}/done/{rank}"]):
        now, found = time.monotonic(), store.add(f"{place}/alive/{rank}", 0)
        if found != beats:
            beats, heard = found, now
        if store.check([f"{place}/failed/{rank}"]):
            raise distributed.DistStoreError(f"process {rank} failed as it prepared its {what}")
        if now - heard > SILENT_S or now - began > PATIENCE_S:
            told = f"process {rank}, which prepares its {what}, was last heard of {now - heard:.0f} s ago"
            raise distributed.DistStoreError(f"{told} and waited for since {now - began:.0f} s")
        time.sleep(LOOK_S)

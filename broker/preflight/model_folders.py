"""Rule that limits which folders of the daemon's host a job may name as its model.

Without it, a quote reveals which folders exist. Used by the daemon's preflight; see docs/guide/teams.md.
"""

import os
import stat
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from broker.domain.errors import InvalidInput, Problem
from broker.preflight.model_lookup import is_folder
from broker.runtime.cpu_threads import RunCpu, run_inline
from trainer.contract.suggestions import short_list
from trainer.contract.train import TrainConfig


async def _alone() -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class ModelFolders:
    """Folders of the daemon's host that jobs may name."""

    roots: tuple[Path, ...] = ()
    """Folders below which models may be; empty: any folder for a single user, none for several."""
    reachable: bool = True
    """False: no provider's machines can read folders of this host."""
    is_shared: Callable[[], Awaitable[bool]] = _alone
    """Returns whether the installation has several users."""

    async def permit(self, train: TrainConfig, run: RunCpu = run_inline) -> TrainConfig:
        """Return the config with links resolved, because a link may later point elsewhere. `run` reads the disk.

        Raises InvalidInput with the same answer for a folder that does not exist and one that is not allowed. With
        several users, files that are closed to other users of this host are not read for any of them.
        """
        if not is_folder(train.model):
            return train
        if not self.reachable:
            raise _refused("no machine here can read folders of the broker's host; give a Hub id")
        if not self.roots:
            if await self.is_shared():
                raise _refused("folders need model_roots in gpubroker.yaml, as there are several users; give a Hub id")
            return train
        return await run(partial(self._permitted, train, await self.is_shared()))

    def _permitted(self, train: TrainConfig, is_shared: bool) -> TrainConfig:
        real = self._below_roots(train.model)
        if real is None or not os.path.isdir(real):
            raise _refused(f"no folder {train.model!r} below model_roots of gpubroker.yaml; give such a folder")
        try:
            files = list(real.iterdir())
            closed = [file.name for file in files if file.is_file() and not file.stat().st_mode & stat.S_IROTH]
        except OSError as e:
            message = f"{train.model!r} cannot be read: {e.strerror}; let the broker read it, or give another folder"
            raise _refused(message) from None
        if any(self._below_roots(str(file)) is None for file in files):
            raise _refused(f"{train.model!r} has links that leave model_roots of gpubroker.yaml; copy the files there")
        if closed and is_shared:
            name = short_list(sorted(closed), 1)
            raise _refused(f"{train.model!r} has files that only their owner may read: {name}; chmod o+r them")
        return train.model_copy(update={"model": str(real)})

    def _below_roots(self, path: str) -> Path | None:
        try:
            real = Path(os.path.realpath(os.path.expanduser(path)))
            return real if any(real.is_relative_to(os.path.realpath(root)) for root in self.roots) else None
        except (OSError, ValueError):
            return None


def _refused(message: str) -> InvalidInput:
    return InvalidInput(Problem(field="train.model", message=message))

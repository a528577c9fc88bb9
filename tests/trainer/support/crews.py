"""Real workers that train together over gloo, forked as the launcher would start them; nodes are loopback addresses."""

import json
import os
import shutil
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.trainer.support.workers import FORKS, HANGS_S, Harm
from trainer.agent.process.child import free_port
from trainer.contract.documents import ExitCode, Parallelism
from trainer.contract.train import TrainConfig
from trainer.core.ipc import Ended, RunFolder, WorkerJob
from trainer.parallel import launch


def _rank(root: Path, variables: dict[str, str], harm: Harm | None) -> None:
    import sys

    import torch

    from trainer.training.worker import main

    os.environ.update(variables)
    torch.set_num_threads(1)
    if harm is not None:
        harm(int(variables.get("RANK", "0")))
    sys.exit(main(root))


class Crew:
    """Workers on `nodes` machines with `each` processes; every machine has a run folder of its own."""

    def __init__(
        self,
        folder: Path,
        train: TrainConfig,
        data: Path,
        *,
        each: int,
        nodes: int = 1,
        how: Parallelism | None = None,
        restore: Path | None = None,
        harm: Harm | None = None,
    ) -> None:
        """Prepare. `harm` is called in each process with its rank before the process begins."""
        self.runs = [RunFolder(root=folder / str(node)) for node in range(nodes)]
        port = free_port()
        self.processes: list[BaseProcess] = []
        for node, run in enumerate(self.runs):
            run.make()
            job = WorkerJob(
                train=train,
                data=str(data),
                data_format=data.suffix[1:],
                number=1,
                save_every_s=0,
                parallelism=how or Parallelism(),
                restore=str(shutil.copytree(restore, run.root / "restore")) if restore else None,
            )
            run.job.write_text(job.model_dump_json())
            for local in range(each):
                place = launch.variables(
                    local, processes_per_node=each, nodes=nodes, node=node, master=f"127.0.0.1:{port}"
                )
                alone = nodes * each == 1
                self.processes.append(FORKS.Process(target=_rank, args=(run.root, {} if alone else place, harm)))

    def start(self) -> "Crew":
        for process in self.processes:
            process.start()
        return self

    def ends(self) -> list[Ended]:
        """Wait for the processes and return how the attempt ended on each machine."""
        for process in self.processes:
            process.join(HANGS_S)
        silent = [run.root.name for run in self.runs if not run.ended.exists()]
        assert not silent, f"machines {silent} left no word; exit codes {[p.exitcode for p in self.processes]}"
        return [Ended.model_validate_json(run.ended.read_bytes()) for run in self.runs]

    def done(self) -> "Crew":
        """Run to the end, and require success."""
        for ended in self.start().ends():
            assert ended.code == ExitCode.COMPLETED, ended.message
        return self

    @property
    def last(self) -> Path:
        return self.runs[0].waiting()[-1]

    def drained(self) -> "Crew":
        """Run with a drain requested from the start: one step, or one micro-batch if one process runs alone."""
        for run in self.runs:
            run.drain.touch()
        for ended in self.start().ends():
            assert ended.code == ExitCode.DRAINED, ended.message
        return self

    def close(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join(60)


def logged_steps(snapshot: Path) -> list[tuple[int, float, float, float]]:
    """Return (step, loss, learning rate, gradient norm) of every step."""
    rows = [json.loads(line) for line in (snapshot / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"], r["lr"], r["grad_norm"]) for r in rows]


def tensors(snapshot: Path, group: str = "model") -> dict[str, Any]:
    """Return whole tensors, whichever files they lie in."""
    from trainer.checkpoint.snapshot import StoredSnapshot

    stored = StoredSnapshot(snapshot)
    return {name: stored.read(group, name) for name in stored.names(group)}

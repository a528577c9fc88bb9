"""Real workers without an agent: forked from a server that has the libraries loaded, so that each starts at once."""

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.trainer.support.harness import until
from trainer.contract.checkpoint_format import RowSkip
from trainer.contract.documents import ExitCode
from trainer.contract.train import TrainConfig
from trainer.core.ipc import Ended, RunFolder, Status, WorkerJob

FORKS = multiprocessing.get_context("forkserver")
KINDS = ("bart", "bert", "falcon", "gemma", "gpt2", "llama", "mistral", "mixtral", "roberta", "t5", "vit")
MODELS = [f"transformers.models.{kind}.modeling_{kind}" for kind in KINDS]
DIFFUSION = [
    f"diffusers.pipelines.stable_diffusion{kind}"
    for kind in (".pipeline_stable_diffusion", "_xl.pipeline_stable_diffusion_xl")
]
FORKS.set_forkserver_preload(
    ["trainer.training.loop", "trainer.agent.agent", "transformers", "peft", "bitsandbytes", *MODELS, *DIFFUSION]
)
HANGS_S = 600
"""Seconds after which a process counts as hung."""
TENSORS = ("model", "optimizer", "gradients")


Harm = Callable[[int], None]
"""A function that runs in a process before its work begins; the argument is its rank."""


def _train(root: Path, harm: Harm | None = None) -> None:
    import sys

    import torch

    from trainer.training.worker import main

    torch.set_num_threads(1)
    if harm is not None:
        harm(0)
    sys.exit(main(root))


def stepping_loops() -> list[Any]:
    """Return the training loops of this process that have begun a step, from now on."""
    from trainer.training.loop import TrainingLoop

    loops: list[Any] = []
    step = TrainingLoop._step

    def begun(loop: TrainingLoop) -> None:
        loops.append(loop)
        step(loop)

    TrainingLoop._step = begun  # type: ignore[method-assign, assignment]
    return loops


def killed_within_a_step(rank: int) -> None:
    """Kill the worker in its third step, after a complete snapshot. It kills itself, as a watcher may be too late."""
    from trainer.training.step import StepRunner

    clip, loops = StepRunner._clip, stepping_loops()

    def fail(runner: StepRunner) -> float:
        if loops[-1]._progress.step == 2:
            until(loops[-1]._run.waiting, "a whole snapshot")
            os.kill(os.getpid(), signal.SIGKILL)
        return clip(runner)

    StepRunner._clip = fail  # type: ignore[method-assign, assignment]


class Worker:
    """One start of a worker over a run folder of its own."""

    def __init__(
        self,
        folder: Path,
        train: TrainConfig,
        data: Path,
        *,
        restore: Path | None = None,
        jumps: tuple[RowSkip, ...] = (),
    ) -> None:
        self.run, self.train = RunFolder(root=folder), train
        self.run.make()
        self._restore = restore
        job = WorkerJob(train=train, data=str(data), data_format=data.suffix[1:], number=1, save_every_s=0, jumps=jumps)
        if restore is not None:
            job = job.model_copy(update={"restore": str(shutil.copytree(restore, folder / "restore"))})
        self.run.job.write_text(job.model_dump_json())

    def start(self, harm: Harm | None = None) -> "Worker":
        self.process: BaseProcess = FORKS.Process(target=_train, args=(self.run.root, harm))
        self.process.start()
        return self

    def end(self) -> Ended:
        """Wait for the process and return how it ended."""
        self.process.join(HANGS_S)
        assert self.run.ended.exists(), f"it left no word; exit code {self.process.exitcode}"
        return Ended.model_validate_json(self.run.ended.read_bytes())

    def killed(self) -> Path:
        """Run until SIGKILL within a step; return the latest snapshot."""
        self.start(killed_within_a_step).process.join(HANGS_S)
        assert self.process.exitcode == -signal.SIGKILL
        return self.last

    @property
    def status(self) -> Status:
        return Status.model_validate_json(self.run.status.read_bytes())

    @property
    def last(self) -> Path:
        return self.run.waiting()[-1]


def story(snapshot: Path) -> tuple[list[Any], dict[str, bytes]]:
    """Return (metrics of each step, tensors) of a snapshot."""
    rows = [json.loads(line) for line in (snapshot / "metrics.jsonl").read_text().splitlines()]
    told = [(r["step"], r["loss"], r["lr"], r["grad_norm"]) for r in rows]
    return told, {name: (snapshot / f"{name}.safetensors").read_bytes() for name in TENSORS}


def finished(folder: Path, train: TrainConfig, data: Path) -> Path:
    """Return the complete snapshot of an undisturbed run."""
    worker = Worker(folder, train, data).start()
    ended = worker.end()
    assert ended.code == ExitCode.COMPLETED, ended.message
    return worker.last


def resumed(folder: Path, train: TrainConfig, data: Path) -> Path:
    """Return the complete snapshot of a run that was SIGKILLed, and then drained within a step."""
    killed = Worker(folder / "killed", train, data).killed()
    drained = Worker(folder / "drained", train, data, restore=killed)
    drained.run.drain.touch()
    assert drained.start().end().code == ExitCode.DRAINED
    assert json.loads((drained.last / "state.json").read_text())["micro_batch_index"] > 0
    last = Worker(folder / "last", train, data, restore=drained.last).start()
    ended = last.end()
    assert ended.code == ExitCode.COMPLETED, ended.message
    return last.last

"""Real workers without an agent: forked from a server that has the libraries loaded, so that each starts at once."""

import json
import multiprocessing
import shutil
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.trainer.harness import until
from trainer.checkpoint_plan import Jump
from trainer.contract.rendezvous import ExitCode
from trainer.contract.train import TrainConfig
from trainer.ipc import Ended, RunFolder, Status, WorkerJob

FORKS = multiprocessing.get_context("forkserver")
MODELS = [
    f"transformers.models.{kind}.modeling_{kind}" for kind in ("bart", "bert", "gpt2", "llama", "roberta", "t5", "vit")
]
DIFFUSION = [
    f"diffusers.pipelines.stable_diffusion{kind}"
    for kind in (".pipeline_stable_diffusion", "_xl.pipeline_stable_diffusion_xl")
]
FORKS.set_forkserver_preload(
    ["trainer.loop", "trainer.agent.run", "transformers", "peft", "bitsandbytes", *MODELS, *DIFFUSION]
)
TENSORS = ("model", "optimizer", "gradients")


def _train(root: Path) -> None:
    import sys

    import torch

    from trainer.worker import main

    torch.set_num_threads(1)
    sys.exit(main(root))


class Worker:
    """One start of a worker over a run folder of its own."""

    def __init__(
        self,
        folder: Path,
        train: TrainConfig,
        data: Path,
        *,
        restore: Path | None = None,
        jumps: tuple[Jump, ...] = (),
    ) -> None:
        self.run, self.train = RunFolder(root=folder), train
        self.run.make()
        self._restore = restore
        job = WorkerJob(train=train, data=str(data), data_format=data.suffix[1:], number=1, save_every_s=0, jumps=jumps)
        if restore is not None:
            job = job.model_copy(update={"restore": str(shutil.copytree(restore, folder / "restore"))})
        self.run.job.write_text(job.model_dump_json())

    def start(self) -> "Worker":
        self.process: BaseProcess = FORKS.Process(target=_train, args=(self.run.root,))
        self.process.start()
        return self

    def end(self) -> Ended:
        """How it ended."""
        self.process.join(120)
        return Ended.model_validate_json(self.run.ended.read_bytes())

    def kill_after(self, step: int) -> Path:
        """SIGKILLs it once so many steps are done and a snapshot is whole; that snapshot."""
        until(lambda: self.run.status.exists() and self.status.step >= step and self.run.waiting(), f"step {step}")
        self.process.kill()
        self.process.join(60)
        return self.run.waiting()[-1]

    @property
    def status(self) -> Status:
        return Status.model_validate_json(self.run.status.read_bytes())

    @property
    def last(self) -> Path:
        return self.run.waiting()[-1]


def story(snapshot: Path) -> tuple[list[Any], dict[str, bytes]]:
    """(what each step said, the tensors) of a snapshot."""
    rows = [json.loads(line) for line in (snapshot / "metrics.jsonl").read_text().splitlines()]
    told = [(r["step"], r["loss"], r["lr"], r["grad_norm"]) for r in rows]
    return told, {name: (snapshot / f"{name}.safetensors").read_bytes() for name in TENSORS}


def finished(folder: Path, train: TrainConfig, data: Path) -> Path:
    """The complete snapshot of an undisturbed run."""
    worker = Worker(folder, train, data).start()
    ended = worker.end()
    assert ended.code == ExitCode.COMPLETED, ended.message
    return worker.last


def resumed(folder: Path, train: TrainConfig, data: Path) -> Path:
    """The complete snapshot of a run that was SIGKILLed, and then drained within a step."""
    killed = Worker(folder / "killed", train, data).start().kill_after(3)
    drained = Worker(folder / "drained", train, data, restore=killed)
    drained.run.drain.touch()
    assert drained.start().end().code == ExitCode.DRAINED
    assert json.loads((drained.last / "state.json").read_text())["micro"] > 0
    last = Worker(folder / "last", train, data, restore=drained.last).start()
    ended = last.end()
    assert ended.code == ExitCode.COMPLETED, ended.message
    return last.last

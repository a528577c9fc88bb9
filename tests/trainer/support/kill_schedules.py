"""Runs that are killed repeatedly by schedule, and must equal the undisturbed run.

A schedule is drawn from its seed: one to four kills of one job. A kill comes inside an accumulation window, an
evaluation, a save or a restore, at the end of an epoch, or at any time. It ends the machine or its worker alone, or it
is a drain.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from tests.crash.gate import Point
from tests.crash.trainee import TOLD
from tests.trainer.support import tiny_jobs, workers
from tests.trainer.support.harness import Agent
from tests.trainer.support.tiny_jobs import EVAL_EVERY, GLOBAL_BATCH, KINDS, STEPS, TRAINED, Kind
from tests.trainer.support.warm_machines import EVALUATING, LOG, How, WarmBench, micro
from trainer.contract.documents import Outcome
from trainer.contract.train import TrainConfig

When = Literal["window", "epoch", "evaluation", "save", "restore", "anytime"]
KILLS = 4
"""Largest number of kills in a schedule."""
TRIES = 20
"""Lives after which a schedule without a kill is broken."""
SAVE = (
    "worker:copy", "worker:write model.safetensors", "worker:write optimizer.safetensors", "worker:write state.json",
    "worker:rename snapshot", "agent:hash model.safetensors", "agent:upload model.safetensors",
    "agent:upload optimizer.safetensors", "agent:create manifest.json", "agent:rename snapshot",
    "agent:remove snapshot", "agent:delete manifest.json",
)  # fmt: skip
RESTORE = ("agent:download model.safetensors", "agent:hash model.safetensors", "worker:load restore")
EVALUATED = 2
"""Batches of one evaluation, at the least."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A planned end of a run: at a point, or `after_s` seconds after the start."""

    when: When
    how: How
    point: Point | None = None
    after_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.when}: {self.how}, {self.point or f'after {self.after_s:.3f} s'}"


@dataclass(frozen=True, kw_only=True)
class Story:
    """Metrics and tensors of a finished job, without times."""

    rows: list[Any]
    """Return (step, loss, learning rate, gradient norm) of every step."""
    hashes: dict[str, str]
    """SHA-256 of weights, moments, results, samples and scores, by path."""


@dataclass(kw_only=True)
class KillCounts:
    """Counts over the schedules that ran."""

    schedules: int = 0
    exact: int = 0
    torn_loaded: int = 0
    """Number of loaded states that were never saved."""
    lost: int = 0
    """Number of restores of a checkpoint older than the last commit."""
    lives: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    """Number of kills by moment and manner."""
    broken: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One kind of job, with the story and the duration of its undisturbed run."""

    name: str
    kind: Kind
    train: TrainConfig
    content: bytes
    calm: Story
    lasts_s: float


class Matrix:
    """Schedules over all kinds of jobs; each kind's undisturbed run is made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs: dict[str, Job] = {}
        self.found = KillCounts()

    def job(self, name: str) -> Job:
        if name not in self._jobs:
            kind, folder = KINDS[name], self._folder / name.replace(" ", "-")
            train, content = tiny_jobs.train(kind, folder / "model"), tiny_jobs.data(kind)
            bench = WarmBench(folder / "calm")
            started = time.monotonic()
            agent = bench.start(train=train, data=bench.data(content, kind.format))
            final = agent.wait()
            assert final.outcome is Outcome.COMPLETED, _words(agent, final.message)
            lasts_s = time.monotonic() - started
            self._jobs[name] = Job(
                name=name, kind=kind, train=train, content=content, calm=story(bench), lasts_s=lasts_s
            )
        return self._jobs[name]

    def carry_out(self, number: int, seed: int) -> None:
        """Carry out one schedule; the kinds of kill take turns."""
        job = self.job(list(KINDS)[number % len(KINDS)])
        draw = random.Random(f"schedule/{seed}/{number}")
        schedule = Schedule(job, self._folder / f"schedule{number}", draw, self.found)
        before = len(self.found.broken)
        schedule.run()
        self.found.schedules += 1
        self.found.exact += len(self.found.broken) == before
        self.found.broken[before:] = [
            f"schedule {number} of {seed}, {job.name}: {b}" for b in self.found.broken[before:]
        ]
        shutil.rmtree(schedule.folder)


class Schedule:
    """Lives of one job until it completes."""

    def __init__(self, job: Job, folder: Path, draw: random.Random, found: KillCounts) -> None:
        self.folder, self._job, self._draw, self._found = folder, job, draw, found
        self._saved: set[str] = set()

    def run(self) -> None:
        """Start agents until one completes after at least one kill. A run that completes without a kill is repeated
        from the beginning.
        """
        kills, done = self._draw.randint(1, KILLS), 0
        bench = WarmBench(self.folder / "0")
        for life in range(1, TRIES + 1):
            kill = drawn(self._draw, self._job, _furthest(bench)) if done < kills else None
            agent = self._life(bench, kill)
            ended = (agent.process.poll() or 0) >= 0 and agent.final.outcome is Outcome.COMPLETED
            if kill is not None and not ended:
                done += 1
                self._found.kills[f"{kill.when} {kill.how}"] += 1
            if ended and done:
                return self._compare(story(bench))
            if ended:
                bench = WarmBench(self.folder / str(life))
            elif kill is None:
                self._found.broken.append(_words(agent, "a life that nobody ended did not come to its end"))
                return
        self._found.broken.append(f"not done after {TRIES} lives")

    def _compare(self, found: Story) -> None:
        calm = self._job.calm
        if (found.rows, found.hashes) != (calm.rows, calm.hashes):
            self._found.broken.append(f"not what the undisturbed run is; {_difference(found, calm)}")

    def _life(self, bench: WarmBench, kill: Kill | None) -> Agent:
        self._found.lives += 1
        furthest = _furthest(bench)
        bench.at, bench.how = (kill.point, kill.how) if kill else (None, "machine")
        agent = bench.start(train=self._job.train, data=bench.data(self._job.content, self._job.kind.format))
        if kill is not None and kill.point is None:
            time.sleep(kill.after_s)
            with contextlib.suppress(ProcessLookupError):  # it has come to its end
                os.kill(agent.process.pid, signal.SIGTERM) if kill.how == "drain" else os.killpg(
                    agent.process.pid, signal.SIGKILL
                )
        agent.process.wait(600)
        self._judge(bench.folder / "work" / agent.attempt / TOLD, furthest)
        return agent

    def _judge(self, told: Path, furthest: int) -> None:
        for one in map(json.loads, told.read_text().splitlines() if told.exists() else ()):
            if "loaded" in one and one["loaded"] not in self._saved:
                self._found.torn_loaded += 1
                self._found.broken.append(f"what was loaded as step {one['step']} was never saved")
            elif "loaded" in one and one["step"] < furthest:
                self._found.lost += 1
                self._found.broken.append(f"step {one['step']} was loaded, and {furthest} was committed")
            elif "saved" in one:
                self._saved.add(one["saved"])


# ---------------------------------------------------------------------------------------------------------------- draws


def drawn(draw: random.Random, job: Job, done: int) -> Kill:
    """Return the next kill of a job whose furthest checkpoint is of step `done`."""
    when: When = draw.choice([w for w in get_args(When) if w != "restore" or done])
    how: How = draw.choice(("machine", "worker", "drain"))
    micros = job.kind.micros
    if when == "window" and done < STEPS:
        return Kill(when=when, how=how, point=micro(draw.randrange(done, STEPS), draw.randrange(1, micros)))
    if when == "epoch" and (ends := [s for s in range(done, STEPS) if _crosses(s) or _crosses(s - 1)]):
        return Kill(when=when, how=how, point=micro(draw.choice(ends), draw.randrange(micros)))
    if when == "evaluation":
        evaluations = 1 + (done == 0) + sum(s % EVAL_EVERY == 0 for s in range(done + 1, STEPS))
        number = draw.randint(1, EVALUATED * evaluations)
        return Kill(when=when, how=how, point=Point(name=EVALUATING, number=number, moment="before"))
    if when in ("save", "restore"):
        name, number = draw.choice(SAVE if when == "save" else RESTORE), draw.randint(1, 3 if when == "save" else 1)
        point = Point(name=name, number=number, moment=draw.choice(("before", "after")))
        return Kill(when=when, how="worker" if how == "drain" else how, point=point)
    return Kill(when="anytime", how="machine" if how == "worker" else how, after_s=draw.uniform(0, job.lasts_s))


def _crosses(step: int) -> bool:
    """Return True if an epoch ends within or at the end of this step's rows."""
    return step >= 0 and step * GLOBAL_BATCH // TRAINED < (step + 1) * GLOBAL_BATCH // TRAINED


# ---------------------------------------------------------------------------------------------------------------- story


def story(bench: WarmBench) -> Story:
    """Return the story of a finished job's complete checkpoint."""
    key, manifest = bench.committed()[0]
    assert manifest.complete, manifest
    folder = bench.files(key)
    rows, _ = workers.story(folder)
    hashed = (".safetensors", "samples.json", "eval.json")
    return Story(rows=rows, hashes={f.path: f.sha256 for f in manifest.files if f.path.endswith(hashed)})


def _furthest(bench: WarmBench) -> int:
    committed = bench.committed()
    return committed[0][1].step if committed else 0


def _difference(one: Story, other: Story) -> str:
    names = {*one.hashes, *other.hashes}
    wrong = sorted(name for name in names if one.hashes.get(name) != other.hashes.get(name))
    rows = next((f"{a} for {b}" for a, b in zip(one.rows, other.rows, strict=False) if a != b), "")
    return f"differ: {', '.join(wrong)} {rows}"


def _words(agent: Agent, what: str) -> str:
    log = agent.bench.folder / "work" / agent.attempt / LOG
    return f"{what}\n{agent.log}\n{log.read_text() if log.exists() else ''}"

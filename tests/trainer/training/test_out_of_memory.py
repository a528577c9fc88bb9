"""A real out-of-memory error is distinguished from all other failures. The next attempt has smaller micro-batches. It
trains on the same samples in the same order, to the same losses."""

import re
import resource
from pathlib import Path
from typing import Any

import pytest

from broker.domain.offer import GIB, QuoteLine
from broker.domain.workload import Workload
from broker.lifecycle.recovery import adjust_plan, adjusted_workload, planned_train_config
from tests.support import build
from tests.trainer.support.harness import Agent, Bench
from tests.trainer.support.warm_machines import WarmBench, micro
from trainer.agent.conclusion import exit_outcome
from trainer.agent.process import child
from trainer.agent.process.child import Child
from trainer.contract.data_config import DataConfig
from trainer.contract.documents import MemoryUse, Outcome
from trainer.contract.train import CheckpointConfig, LoraConfig, TrainConfig

ROWS, LONG, STEPS = 128, 128, 3
SMALL = 1 * GIB
"""Private memory that a process may have: enough for 8 of the rows at once, and not for 128, whose logits alone take
0.25 GiB several times over."""
ESTIMATED = MemoryUse(weights=GIB // 4, gradients=0, optimizer=0, activations=GIB // 2)
TOLERANCE = 1e-5
"""Relative, of a loss: sums of other parts, in float32."""


class Rough(WarmBench):
    """A bench that forks its agent if the agent is to be drained at a point. Otherwise the agent is a separate process
    with its own memory.
    """

    def _spawn(self, attempt: str) -> Agent:
        return super()._spawn(attempt) if self.at else Bench._spawn(self, attempt)


def data() -> bytes:
    lines = [f"w{i},{' '.join(f'w{(i * 7 + j * j) % 90}' for j in range(LONG))}" for i in range(ROWS)]
    return "\n".join(["word,meaning", *lines]).encode()


def train_config(folder: Path, micro_batch: int) -> TrainConfig:
    return TrainConfig(
        model=str(folder),
        data=DataConfig(path="upload:x", prompt="{word} ", completion="{meaning}", eval_share=0.0),
        method=LoraConfig(r=4, dropout=0.0),
        max_steps=STEPS,
        global_batch=ROWS,
        micro_batch=micro_batch,
        max_length=LONG,
    )


def start(bench: Bench, train: TrainConfig, *, limited: bool = False, **more: Any) -> Agent:
    every = CheckpointConfig(every_s=1, keep=9)
    agent = bench.start(train=train, data=bench.data(data(), "csv"), checkpoint=every, **more)
    if limited:  # before it starts the worker, which inherits it
        resource.prlimit(agent.process.pid, resource.RLIMIT_DATA, (SMALL, SMALL))
    return agent


def steps(bench: Bench) -> list[dict[str, Any]]:
    return bench.metrics(bench.committed()[0][0])


def test_the_next_attempt_sees_the_same_samples_at_the_same_global_batch(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    calm, rough = Bench(tmp_path / "calm"), Rough(tmp_path / "rough")
    try:
        whole = start(calm, train_config(tiny_models["lora"], 32)).wait()
        assert whole.outcome is Outcome.COMPLETED, whole.message

        rough.at, rough.how = micro(1, 0), "drain"
        before = start(rough, train_config(tiny_models["lora"], 32)).wait()
        assert before.outcome is Outcome.DRAINED
        rough.at = None
        asked = train_config(tiny_models["lora"], ROWS)
        short = start(rough, asked, limited=True, memory=ESTIMATED).wait()
        assert (short.outcome, short.ran_out) == (Outcome.OOM, "host"), short.message
        assert short.message.startswith("host memory is too small: ")
        assert "\n" not in short.message
        assert re.search(
            r"GiB held: weights 0\.0\d \(estimated 0\.25\), gradients 0\.00 .*, activations and the", short.message
        )

        work = Workload(shape=None, method="lora", lora_r=4, micro_batch=ROWS, global_batch=ROWS)
        job = build.job(workload=work)
        line: QuoteLine = build.line(accelerator="cpu", gpus=0, gpu_memory_bytes=SMALL)
        changed = adjust_plan(job, line, host=False)
        told = planned_train_config(asked, None, changed)
        assert adjusted_workload(job).global_batch == told.global_batch == ROWS
        assert told.micro_batch == changed.micro_batch < ROWS
        after = start(rough, told.model_copy(update={"micro_batch": 8}), limited=True).wait()
        assert after.outcome is Outcome.COMPLETED, after.message
        assert after.resumed_from

        undisturbed, resumed = steps(calm), steps(rough)
        assert [row["step"] for row in resumed] == [row["step"] for row in undisturbed] == list(range(1, STEPS + 1))
        assert [row["tokens"] for row in resumed] == [row["tokens"] for row in undisturbed]
        for one, other in zip(undisturbed, resumed, strict=True):
            assert other["loss"] == pytest.approx(one["loss"], rel=TOLERANCE)
            assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
    finally:
        calm.close()
        rough.close()


@pytest.mark.parametrize(
    ("code", "script", "kills", "outcome"),
    [
        (-9, False, 1, Outcome.OOM),
        (137, True, 1, Outcome.OOM),
        (1, False, 1, Outcome.OOM),
        (-9, False, 0, Outcome.INFRASTRUCTURE),
        (137, True, 0, Outcome.USER_ERROR),
        (71, True, 0, Outcome.OOM),
        (0, True, 1, Outcome.COMPLETED),
        (64, False, 1, Outcome.USER_ERROR),
    ],
)
def test_a_kill_for_memory_is_one_only_where_the_kernel_says_so(
    monkeypatch: pytest.MonkeyPatch, code: int, script: bool, kills: int, outcome: Outcome
) -> None:
    """A shell reports a killed child as 137 and a launcher as 1, and a preempted machine kills its processes, too."""
    monkeypatch.setattr(child, "oom_kills", lambda: 3 + kills)
    ended = Child(None, -1, 3)  # type: ignore[arg-type]  # only what its end means is asked
    killed = ended.killed_for_memory
    assert exit_outcome(code, script=script, end_requested=ended.asked, killed_for_memory=killed) is outcome

"""A run that is killed repeatedly equals an undisturbed run in every loss and weight, bit by bit."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.conftest import rows
from tests.trainer.support.harness import Agent, Bench, until
from trainer.contract.data_config import DataConfig
from trainer.contract.documents import Manifest, Outcome
from trainer.contract.train import (
    CheckpointConfig,
    FullConfig,
    LoraConfig,
    OptimConfig,
    SamplesConfig,
    TrainConfig,
)

STEPS = 60
SEED = os.environ.get("GPUBROKER_TEST_SEED") or str(random.SystemRandom().randrange(10**6))


def job(bench: Bench, folder: Path, kind: str) -> dict[str, Any]:
    method = LoraConfig(r=64, dropout=0.2) if kind == "lora" else FullConfig()
    train = TrainConfig(
        model=str(folder),
        data=DataConfig(path="upload:x", prompt="{word} ", completion="{meaning}", eval_share=0.1),
        method=method,
        optim=OptimConfig(lr=1e-3, weight_decay=0.1),
        max_steps=STEPS,
        global_batch=32,
        micro_batch=2,
        max_length=32,
        samples=SamplesConfig(prompts=("w1", "w2 w3"), max_new_tokens=4),
    )
    return {"train": train, "data": bench.data(rows(), "csv"), "checkpoint": CheckpointConfig(every_s=1, keep=2)}


def kill(agent: Agent) -> None:
    """Kill the agent. If the job completed before the kill, delete its complete checkpoint, so that it resumes."""
    agent.kill_group()
    for key, manifest in agent.bench.committed():
        if manifest.complete:
            shutil.rmtree(agent.bench.path(key).parent)


def kill_at_step(agent: Agent, step: int) -> None:
    until(lambda: agent.beat and agent.beat.step >= step, f"step {step}")
    kill(agent)


def kill_while_saving(bench: Bench, spec: dict[str, Any]) -> None:
    """Kill during a save, with retries: a small checkpoint may begin and end between two polls."""
    agent = bench.start(**spec)
    until(lambda: bench.torn(agent.attempt) or agent.process.poll() is not None, "a checkpoint that is being written")
    seen = agent.process.poll() is None
    kill(agent)
    if not seen:
        kill_while_saving(bench, spec)


def whole_story(bench: Bench) -> tuple[list[tuple[int, float, float, float]], dict[str, str], Manifest]:
    """(rows of metrics, hashes of the tensors, manifest) of the finished job."""
    key, manifest = bench.committed()[0]
    metrics = [(r["step"], r["loss"], r["lr"], r["grad_norm"]) for r in bench.metrics(key)]
    hashes = {f.path: f.sha256 for f in manifest.files if f.path.endswith(".safetensors")}
    return metrics, hashes, manifest


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_resume_bitwise(kind: str, tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    print(f"GPUBROKER_TEST_SEED={SEED}")
    chance = random.Random(f"{SEED}-{kind}")
    calm, rough = Bench(tmp_path / "calm"), Bench(tmp_path / "rough")
    try:
        undisturbed = calm.start(**job(calm, tiny_models[kind], kind)).wait()
        assert undisturbed.outcome is Outcome.COMPLETED, undisturbed.message

        spec = job(rough, tiny_models[kind], kind)
        kill_at_step(rough.start(**spec), chance.randrange(1, STEPS // 2))
        kill_while_saving(rough, spec)
        until_one_is_committed(rough, spec)
        stop_within_a_step(rough, spec)
        kill_at_step(rough.start(**spec), rough.committed()[0][1].step + chance.randrange(1, 5))
        agent = rough.start(**spec)
        assert agent.wait().outcome is Outcome.COMPLETED, agent.log
        assert agent.final.resumed_from

        expected, actual = whole_story(calm), whole_story(rough)
        assert [r[0] for r in expected[0]] == list(range(1, STEPS + 1))
        assert actual[0] == expected[0]
        assert actual[1] == expected[1]
        assert actual[2].complete
        assert actual[2].step == STEPS
        assert agent.final.heldout_loss_before == undisturbed.heldout_loss_before
        assert agent.final.heldout_loss_after == undisturbed.heldout_loss_after
        assert undisturbed.heldout_loss_before is not None
        assert undisturbed.heldout_loss_after is not None
        assert undisturbed.heldout_loss_after < undisturbed.heldout_loss_before
    finally:
        calm.close()
        rough.close()


def until_one_is_committed(bench: Bench, spec: dict[str, Any]) -> None:
    """Start and kill agents until a checkpoint is committed, because the test that follows resumes from it."""
    while not bench.committed():
        agent = bench.start(**spec)
        until(bench.committed, "a committed checkpoint")
        kill(agent)


def stop_within_a_step(bench: Bench, spec: dict[str, Any]) -> None:
    """Drain after one micro-batch, so that the gradients so far must survive."""
    agent = bench.start(want="drain", **spec)
    assert agent.wait().outcome is Outcome.DRAINED
    saved = agent.final.checkpoint
    assert saved is not None
    state = json.loads((bench.files(saved.manifest) / "state.json").read_text())
    assert state["micro_batch_index"] > 0, state

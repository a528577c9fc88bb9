"""Steps, tokens and evaluations that follow from a spec and a data set."""

from dataclasses import replace
from typing import Any

import pytest

from broker.domain.spec import JobSpec
from broker.estimator.workload import Rows, remaining, workload
from tests.support.machines import LLAMA_3_8B, WORK, spec
from trainer.dataset.prompts import held_out

ROWS = Rows(count=938, tokens_mean=71.0, tokens_longest=300)


def of(rows: Rows = ROWS, **train: Any) -> Any:
    return workload(spec(train=train), LLAMA_3_8B, rows)


def test_epochs_count_the_training_rows_and_a_started_batch() -> None:
    assert of(epochs=1).steps == 112  # 938 - 47 held out = 891, by 8
    assert of(epochs=0.001).steps == 1
    assert of(epochs=50, max_steps=45).steps == 45


def test_rows_are_cut_at_max_length() -> None:
    assert (of(max_length=512).sequence, of(max_length=128).sequence) == (300, 128)
    assert of(max_length=32).tokens_per_row == 32
    assert of(max_length=512, packing=True).sequence == 512, "packs fill it"


def test_evaluations_at_both_ends_and_between() -> None:
    assert of(max_steps=45).eval_rows == 47 * 2
    assert of(max_steps=45, eval_every_steps=10).eval_rows == 47 * 6
    assert of(max_steps=45, data={"path": "a.csv", "completion": "{x}", "eval_share": 0}).eval_rows == 0


def test_the_method_and_its_memory_options_are_carried_over() -> None:
    lora, full = of(), of(method={"kind": "full"}, precision="fp16", gradient_checkpointing=True)
    assert (lora.method, lora.lora_r, lora.lora_targets) == ("lora", 16, "all-linear")
    assert (full.method, full.lora_r, full.precision, full.gradient_checkpointing) == ("full", 0, "fp16", True)


def test_a_script_has_a_workload_without_a_model() -> None:
    script = JobSpec.model_validate(
        {"name": "s", "cap_usd": "1", "script": {"code": "x", "command": ["true"]}, "checkpoint": {"every_s": 60}}
    )
    made = workload(script, None, None)
    assert (made.shape, made.method, made.checkpoint_every_s) == (None, "script", 60)


@pytest.mark.parametrize(
    ("rows", "share", "held"), [(938, 0.05, 47), (10, 0.01, 1), (2, 0.99, 1), (1, 0.5, 0), (9, 0, 0)]
)
def test_held_out_rows_leave_one_to_train_on(rows: int, share: float, held: int) -> None:
    assert held_out(rows, share) == held


def test_the_trainer_splits_and_counts_alike() -> None:
    pytest.importorskip("numpy")
    from trainer.batching.sampler import split
    from trainer.optim.learning_rates import total_steps

    for rows in (1, 2, 3, 19, 20, 21, 938):
        for share in (0.0, 0.05, 0.3, 0.99):
            config = spec(train={"data": {"path": "a.csv", "completion": "{x}", "eval_share": share}, "epochs": 1.5})
            assert config.train is not None
            training, held = split(17, rows, share)
            assert held_out(rows, share) == len(held)
            made = workload(config, LLAMA_3_8B, replace(ROWS, count=rows))
            assert made.steps == total_steps(config.train, len(training))


def test_remaining_steps_are_never_negative() -> None:
    assert remaining(WORK, 100).steps == WORK.steps - 100
    assert remaining(WORK, 10**6).steps == 0

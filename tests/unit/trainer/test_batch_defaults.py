"""`global_batch: auto`: which published number a job gets."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.contract.train import TrainConfig
from trainer.dataset import batch_defaults
from trainer.dataset.prompts import held_out

LABELLED = {"prompt": "{a}", "label": "b"}
DATA: dict[str, dict[str, Any]] = {
    "causal_lm": {"completion": "{a}"},
    "text_classification": LABELLED,
    "text_regression": LABELLED,
    "token_classification": {"words": "a", "label": "b"},
    "seq2seq": {"prompt": "{a}", "completion": "{b}"},
    "dpo": {"prompt": "{a}", "chosen": "{b}", "rejected": "{c}"},
    "orpo": {"prompt": "{a}", "chosen": "{b}", "rejected": "{c}"},
    "kto": {"prompt": "{a}", "completion": "{b}", "label": "c"},
    "reward_model": {"prompt": "{a}", "chosen": "{b}", "rejected": "{c}"},
    "image_classification": {"image": "a", "label": "b"},
    "text_to_image": {"image": "a", "prompt": "{b}"},
}


def train(task: str = "causal_lm", kind: str = "lora", **changes: Any) -> TrainConfig:
    data = {"path": "a.csv", "eval_share": 0, **DATA[task], **changes.pop("data", {})}
    return TrainConfig.model_validate(
        {"task": task, "model": "m", "method": {"kind": kind}, "data": data, "global_batch": "auto", **changes}
    )


@pytest.mark.parametrize(
    ("config", "rows", "batch", "source"),
    [
        (train(), 9_846, 16, "QLoRA"),
        (train(), 10**6, 16, "QLoRA"),
        (train(), 5_000, 8, "8 of 5,000 for 16 of 9,846"),
        (train(kind="qlora"), 20_000, 16, "QLoRA"),
        (train(kind="full"), 60_000, 128, "Alpaca"),
        (train(kind="full"), 52_001, 32, "LIMA"),
        (train(kind="full"), 700, 16, "16 of 700 for 32 of 1,000"),
        (train(kind="full"), 20, 8, "Smith and Le"),
        (train(kind="full"), 5, 5, "no more than the 5 rows"),
        (train("text_classification"), 3_000, 32, "Devlin"),
        (train("text_classification", data={"eval_share": 0.5}), 3_000, 16, "16 of 1,500 for 32 of 2,490"),
        (train("seq2seq"), 87_599, 128, "Raffel"),
        (train("dpo"), 64_000, 32, "Zephyr"),
        (train("orpo"), 43_835, 4, "orpo.py"),
        (train("kto"), 13_500, 16, "kto.py"),
        (train("reward_model"), 100, 8, "TRL"),
        (train("image_classification"), 2_000, 8, "transformers"),
        (train("text_to_image"), 10, 4, "diffusers"),
        (train(micro_batch=6), 10_000, 12, "a multiple of micro_batch 6"),
        (train(micro_batch=32), 10_000, 32, "a multiple of micro_batch 32"),
    ],
)
def test_the_recipe_is_that_of_the_task_the_method_and_the_rows(
    config: TrainConfig, rows: int, batch: int, source: str
) -> None:
    found, told = batch_defaults.resolve_global_batch(config, rows)
    assert (found.global_batch, found.global_batch_rows) == (batch, batch)
    assert told.startswith(f"global_batch auto: {batch} (")
    assert source in told
    assert found.model_copy(update={"global_batch": "auto"}) == config


@pytest.mark.parametrize(
    ("config", "machines", "batch", "words"),
    [
        (train(), 3, 15, "a multiple of 3 machines"),
        (train(micro_batch=5), 2, 10, "a multiple of micro_batch 5 for 2 machines"),
        (train(), 4, 16, "QLoRA"),
    ],
)
def test_machines_take_equal_parts_of_a_step(config: TrainConfig, machines: int, batch: int, words: str) -> None:
    found, told = batch_defaults.resolve_global_batch(config, 10_000, machines)
    assert found.global_batch == batch
    assert words in told


@given(
    st.sampled_from(sorted(DATA)), st.integers(1, 200_000), st.sampled_from([0.0, 0.05, 0.9]),
    st.just("auto") | st.integers(1, 64),
)  # fmt: skip
def test_the_default_batch_is_valid_for_a_job(task: str, rows: int, share: float, micro: Any) -> None:
    config = train(task, data={"eval_share": share}, micro_batch=micro)
    found, _ = batch_defaults.resolve_global_batch(config, rows)
    assert TrainConfig.model_validate(found.model_dump()) == found
    assert batch_defaults.resolve_global_batch(found, rows) == (found, "")
    there = rows - held_out(rows, share)
    assert found.global_batch_rows <= there or found.global_batch_rows == micro
    more, _ = batch_defaults.resolve_global_batch(config, 2 * rows)
    assert micro != "auto" or more.global_batch_rows >= found.global_batch_rows


def test_no_step_is_counted_before_the_batch_is_settled() -> None:
    with pytest.raises(ValueError, match="has no number yet"):
        _ = train().micro_batch_rows
    assert train(micro_batch=3).micro_batch_rows == 3

"""A fine-tune that cannot work says whose fault it is and what to do, in one line."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.conftest import rows
from tests.trainer.support.harness import Bench
from trainer.batching.examples import Example, collate, encode, micro_batches
from trainer.contract.data_config import DataConfig
from trainer.contract.documents import Outcome, World
from trainer.contract.train import TrainConfig


@pytest.mark.parametrize(
    ("changes", "content", "outcome", "message"),
    [
        ({"model": "/no/such/model"}, rows(), Outcome.USER_ERROR, "train.model: no folder '/no/such/model'"),
        ({"prompt": "{wrod}"}, rows(), Outcome.DATA, "data.prompt: no column 'wrod' in the data; it has meaning, word"),
        ({}, b"word,meaning\nw1,w2,w3\n", Outcome.DATA, "data line 2: more cells than the header's 2"),
    ],
)
def test_a_fault_gives_its_outcome_and_message(
    bench: Bench,
    tiny_models: dict[str, Path],
    changes: dict[str, Any],
    content: bytes,
    outcome: Outcome,
    message: str,
) -> None:
    data = DataConfig(path="upload:x", prompt=changes.get("prompt", "{word} "), completion="{meaning}")
    train = TrainConfig(model=changes.get("model", str(tiny_models["lora"])), data=data, max_steps=1)
    final = bench.start(train=train, data=bench.data(content, "csv")).wait()
    assert final.outcome is outcome
    assert final.message.startswith(message)
    assert "\n" not in final.message


def test_gpus_that_were_bought_but_cannot_be_used_end_the_attempt(bench: Bench, tiny_models: dict[str, Path]) -> None:
    bench.env = {"CUDA_VISIBLE_DEVICES": ""}
    data = DataConfig(path="upload:x", prompt="{word} ", completion="{meaning}")
    train = TrainConfig(model=str(tiny_models["lora"]), data=data, max_steps=1)
    final = bench.start(train=train, data=bench.data(rows(), "csv"), world=World(gpus_per_node=1)).wait()
    assert final.outcome is Outcome.INFRASTRUCTURE
    assert final.message.startswith("torch can use 0 of 1 GPUs; the driver may be too old")


@pytest.fixture(scope="session")
def tokenizer(tiny_models: dict[str, Path]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_models["lora"])


def test_loss_lies_on_the_completion_only(tokenizer: Any) -> None:
    import torch

    example = encode(tokenizer, "w0 w1 ", "w2 w3", 32)
    assert example.ids == [2, 3, 4, 5, 0], "words from 2 on, then the end of text"
    batch = collate([example, Example(ids=[2, 4], prompt=1)], 0, torch.device("cpu"))
    assert batch["labels"].tolist() == [[-100, -100, 4, 5, 0], [-100, 4, -100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]


def test_long_rows_are_cut_at_the_end(tokenizer: Any) -> None:
    example = encode(tokenizer, "w0 w1", " w2 w3 w4", 4)
    assert (example.ids, example.prompt, example.targets) == ([2, 3, 4, 5], 2, 2)


def test_rows_of_one_length_share_a_micro_batch() -> None:
    examples = [Example(ids=[1] * size, prompt=1) for size in (3, 9, 2, 8)]
    assert [[len(e.ids) for e in batch] for batch in micro_batches(examples, 2)] == [[9, 8], [3, 2]]

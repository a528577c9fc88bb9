"""A divided model learns the same as an undivided one, for every task, method and precision."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.conftest import rows
from tests.trainer.support.crews import Crew, logged_steps
from tests.trainer.support.tiny_models import bert, causal, llama, t5
from trainer.contract.data_config import DataConfig
from trainer.contract.documents import Parallelism
from trainer.contract.train import FullConfig, LoraConfig, OptimConfig, SamplesConfig, TrainConfig

LORA = LoraConfig(r=4)
CASES: dict[str, tuple[Callable[[Path], Path], dict[str, str], dict[str, Any]]] = {
    "bf16, recomputed": (
        llama,
        {"completion": "{meaning}"},
        {"method": LORA, "precision": "bf16", "gradient_checkpointing": True},
    ),
    "a mixture of experts": (partial(causal, "mixtral"), {"completion": "{meaning}"}, {"method": FullConfig()}),
    "fewer rows than processes": (
        llama,
        {"completion": "{meaning}"},
        {"method": FullConfig(), "global_batch": 1, "micro_batch": 1},
    ),
    "packed": (llama, {"completion": "{meaning}"}, {"method": FullConfig(), "packing": True}),
    "encoder-decoder": (
        t5,
        {"completion": "{meaning}"},
        {"method": FullConfig(), "task": "seq2seq", "samples": SamplesConfig(prompts=("w1",), max_new_tokens=3)},
    ),
    "a head that no checkpoint has": (bert, {"label": "kind"}, {"method": LORA, "task": "text_classification"}),
    "rewards": (llama, {"chosen": "{meaning}", "rejected": "w5 w6"}, {"method": LORA, "task": "reward_model"}),
    "rewards, each process all of it": (
        llama,
        {"chosen": "{meaning}", "rejected": "w5 w6"},
        {"method": LORA, "task": "reward_model"},
    ),
    "preferences": (llama, {"chosen": "{meaning}", "rejected": "w5 w6"}, {"method": LORA, "task": "dpo"}),
    "odds, each process all of it": (
        llama,
        {"chosen": "{meaning}", "rejected": "w5 w6"},
        {"method": LORA, "task": "orpo"},
    ),
    "ratings": (llama, {"completion": "{meaning}", "label": "liked"}, {"method": LORA, "task": "kto"}),
    "ratings, each process all of it": (
        llama,
        {"completion": "{meaning}", "label": "liked"},
        {"method": LORA, "task": "kto", "kto": {"beta": 0.5, "undesirable_weight": 1.3}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_sharded_training_equals_unsharded(case: str, tmp_path: Path) -> None:
    make, columns, more = CASES[case]
    head, *lines = rows().decode().splitlines()
    data = tmp_path / "data.csv"
    data.write_text(
        "\n".join([f"{head},kind,liked", *(f"{line},{'ab'[n % 2]},{n % 2}" for n, line in enumerate(lines))])
    )
    train = TrainConfig(
        **{
            "model": str(make(tmp_path / "model")),
            "data": DataConfig(path="upload:x", prompt="{word} ", eval_share=0.1, **columns),
            "optim": OptimConfig(lr=1e-2),
            "max_steps": 2,
            "global_batch": 8,
            "micro_batch": 2,
            "max_length": 32,
            "precision": "fp32",
            **more,
        }
    )
    whole = Crew(tmp_path / "whole", train, data, each=1).done().last
    how = Parallelism(kind="ddp" if case.endswith("each process all of it") else "fsdp")
    divided = Crew(tmp_path / "divided", train, data, each=2, how=how).done().last
    tolerance = 1e-2 if train.precision == "bf16" else 1e-5
    for one, other in zip(logged_steps(divided), logged_steps(whole), strict=True):
        assert one == pytest.approx(other, rel=tolerance)
    scores = [json.loads((folder / "eval.json").read_text()) for folder in (divided, whole)]
    assert scores[0]["heldout_loss_after"] == pytest.approx(scores[1]["heldout_loss_after"], rel=tolerance)
    assert (divided / "samples.json").read_text() == (whole / "samples.json").read_text()

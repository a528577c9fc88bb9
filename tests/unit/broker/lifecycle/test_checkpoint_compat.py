"""A job that starts from another job's checkpoint must have a parameter for each of its tensors."""

from typing import Any

import pytest

from broker.domain.spec import JobSpec
from broker.lifecycle.checkpoint_compat import incompatibility

DATA = {"path": "rows.csv", "completion": "{a}"}
SCRIPT = JobSpec.model_validate(
    {"name": "job", "cap_usd": "1", "script": {"code": "upload:" + "0" * 64, "command": ["true"]}}
)


def train(**changes: Any) -> JobSpec:
    values = {"model": "a/b", "data": DATA, "method": {"kind": "lora", "r": 8}, **changes}
    return JobSpec.model_validate({"name": "job", "cap_usd": "1", "train": values})


@pytest.mark.parametrize(
    ("changes", "field", "told"),
    [
        ({"method": {"kind": "lora", "r": 16}}, "train.method.r", "16, but the job of init_from was trained with 8"),
        ({"method": {"kind": "full"}}, "train.method.kind", "full, but the job of init_from was trained with lora"),
        ({"method": {"kind": "lora", "r": 8, "dora": True}}, "train.method.dora", "True, but"),
        ({"model": "a/c"}, "train.model", "a/c, but the job of init_from was trained with a/b"),
        ({"revision": "v2"}, "train.revision", "v2, but the job of init_from was trained with main"),
        ({"optim": {"name": "sgd", "lr": 0.1}}, "train.optim.name", "sgd, but"),
        ({"task": "reward_model", "data": {"path": "x.csv", "prompt": "{p}", "chosen": "{a}", "rejected": "{b}"}},
         "train.task", "reward_model, but"),
    ],
)  # fmt: skip
def test_a_tensor_without_a_counterpart_names_its_field(changes: dict[str, Any], field: str, told: str) -> None:
    found = incompatibility(train(), train(**changes))
    assert found is not None
    assert found[0] == field
    assert found[1].startswith(told)
    assert found[1].endswith("or leave init_from out")


def test_a_training_cannot_start_from_a_script() -> None:
    assert incompatibility(SCRIPT, train()) == (
        "init_from",
        "that job is a script and this one is a train; leave it out",
    )
    assert incompatibility(train(), SCRIPT) == (
        "init_from",
        "that job is a train and this one is a script; leave it out",
    )
    assert incompatibility(SCRIPT, SCRIPT) is None


@pytest.mark.parametrize(
    "changes",
    [{}, {"revision": "main"}, {"epochs": 9}, {"seed": 3}, {"optim": {"lr": 1e-3}},
     {"method": {"kind": "lora", "r": 8, "alpha": 1}},
     {"data": DATA | {"path": "more.csv"}}, {"method": {"kind": "lora", "r": 8, "rslora": True}}],
)  # fmt: skip
def test_settings_that_shape_no_tensor_may_differ(changes: dict[str, Any]) -> None:
    assert incompatibility(train(), train(**changes)) is None
    full = {"method": {"kind": "full"}}
    assert incompatibility(train(**full), train(model="mirror/b", **full)) is None, "all weights are in the checkpoint"

"""Process layout of the trainer that follows from the plan's parallelism."""

from dataclasses import replace

import pytest

from broker.domain.workload import Plan
from broker.estimator.planning.plan_search import world
from trainer.contract.documents import Parallelism, World


@pytest.mark.parametrize(
    ("parallelism", "gpus", "expected"),
    [
        ("single", 1, Parallelism()),
        ("ddp", 8, Parallelism()),
        ("fsdp", 8, Parallelism(kind="fsdp")),
        ("hybrid", 8, Parallelism(kind="fsdp", shard=8)),
        ("hybrid", 0, Parallelism(kind="fsdp", shard=1)),
    ],
)
def test_the_plans_parallelism_gives_the_process_layout(parallelism: str, gpus: int, expected: Parallelism) -> None:
    plan = Plan(parallelism=parallelism, micro_batch=1, devices=2 * max(1, gpus))  # type: ignore[arg-type]
    assert world(plan, nodes=2, gpus=gpus) == World(nodes=2, gpus_per_node=gpus, parallelism=expected)


def test_gpus_that_the_plan_leaves_idle_have_no_process() -> None:
    """A further process would take GPU memory and RAM from the processes that compute."""
    six = Plan(parallelism="ddp", micro_batch=1, devices=6)
    assert world(six, nodes=1, gpus=8).gpus_per_node == 6
    assert world(replace(six, parallelism="hybrid"), nodes=2, gpus=8) == World(
        nodes=2, gpus_per_node=3, parallelism=Parallelism(kind="fsdp", shard=3)
    )


def test_without_a_plan_every_process_holds_the_whole_model() -> None:
    assert world(None, nodes=2, gpus=4) == World(nodes=2, gpus_per_node=4)

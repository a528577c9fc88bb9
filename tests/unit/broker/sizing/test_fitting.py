"""Smallest changes with which a fine-tune fits, and the exit code if it does not fit."""

import json
import shlex
from typing import Any

import pytest
from typer.testing import CliRunner

from broker.cli.main import app
from broker.sizing.estimate import EstimateError, estimate

MISTRAL = "mistralai/Mistral-7B-v0.1"
CASES: dict[str, list[str]] = {
    "full": ["--method", "full", "--gpu", "A100-80GB", "--seq", "4096", "--micro-batch", "4"],
    "long": ["--gpu", "L40S", "--seq", "8192", "--micro-batch", "8", "--gradient-checkpointing"],
    "copies": ["--method", "full", "--gpu", "H100-SXM", "--gpus", "8"],
    "short": ["--gpu", "A100-80GB", "--seq", "8192", "--micro-batch", "4"],
    "dpo": ["--task", "dpo", "--gpu", "rtx4090", "--micro-batch", "8"],
}


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["estimate", MISTRAL, *words, "--json"])


@pytest.mark.parametrize("case", CASES)
def test_each_listed_change_fits_when_it_is_made(case: str) -> None:
    asked = CASES[case]
    found = run(*asked)
    assert found.exit_code == 1
    ways = json.loads(found.stdout)["ways_to_fit"]
    assert len(ways) >= 2
    for way in ways:
        ran = run(*asked, *shlex.split(way["options"]))
        assert (ran.exit_code, json.loads(ran.stdout)["fits"]) == (0, True), way
        assert json.loads(ran.stdout)["device_used_bytes"] == way["device_used_bytes"]


def test_kinds_of_change_in_the_order_of_their_cost() -> None:
    kinds = [[way["change"] for way in json.loads(run(*CASES[case]).stdout)["ways_to_fit"]] for case in CASES]
    order = ["recomputation", "sharding", "micro-batch", "method", "GPUs", "card"]
    assert all(found == [kind for kind in order if kind in found] for found in kinds)
    assert {kind for found in kinds for kind in found} == set(order)


def test_a_smaller_micro_batch_keeps_pairs_together() -> None:
    (way,) = (w for w in json.loads(run(*CASES["dpo"]).stdout)["ways_to_fit"] if w["change"] == "micro-batch")
    assert way["options"].startswith("--micro-batch 4") or "--accumulate" in way["options"]


def test_what_does_not_fit_prints_no_speed_and_a_table() -> None:
    result = CliRunner().invoke(app, ["estimate", MISTRAL, *CASES["full"]])
    assert result.exit_code == 1
    assert "tokens/s" not in result.stdout
    assert "change  nvidia-smi  options" in result.stdout
    document = json.loads(run(*CASES["full"]).stdout)
    assert (document["tokens_per_s"], document["tokens_per_s_basis"]) == (None, "does not fit")


def test_no_method_is_proposed_that_the_trainer_refuses() -> None:
    """A mixture's experts are one tensor, which bitsandbytes does not quantise; float32 has no QLoRA."""
    mixture = estimate("mistralai/Mixtral-8x7B-v0.1", method="full", gpu="A100-80GB")
    assert "--method qlora" not in " ".join(way["options"] for way in mixture["ways_to_fit"])
    single = estimate(MISTRAL, method="full", precision="fp32", gpu="L4")
    assert "--method qlora" not in " ".join(way["options"] for way in single["ways_to_fit"])


def test_a_plan_that_fits_lists_no_changes() -> None:
    assert estimate(MISTRAL, gpu="H100-SXM", seq=512, fit=True)["ways_to_fit"] == []


@pytest.mark.parametrize(
    ("gpu", "message"),
    [(None, "--fit: give --gpu, for example --gpu L40S"), ("abacus", "--fit: --gpu abacus: not known")],
)
def test_fit_needs_a_known_gpu(gpu: str | None, message: str) -> None:
    with pytest.raises(EstimateError, match=message):
        estimate(MISTRAL, gpu=gpu, fit=True)

"""`gpubroker models` and `gpubroker gpus`, offline."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from broker.cli.main import app
from broker.model_catalog import catalog as catalogue


def told(*argv: str) -> list[dict[str, Any]]:
    ran = CliRunner().invoke(app, [*argv, "--json"])
    assert ran.exit_code == 0, ran.stderr
    found: list[dict[str, Any]] = json.loads(ran.stdout)
    return found


def test_every_model_of_the_catalogue_is_listed_with_what_its_config_says() -> None:
    models = {model["id"]: model for model in told("models")}
    assert set(models) == set(catalogue.names())
    llama = models["meta-llama/Llama-3.1-8B"]
    assert llama["parameters"] == 8_030_261_248
    assert (llama["family"], llama["context_tokens"], llama["gated"]) == ("llama", 131_072, True)
    assert models["google/gemma-3-4b-it"]["context_tokens"] == 131_072, "that of its text model"
    assert models["google/flan-t5-xl"]["context_tokens"] is None, "relative positions end nowhere"
    assert all(model["family"] for model in models.values())


def test_words_choose_by_name_and_family() -> None:
    assert {one["family"] for one in told("models", "whisper")} == {"whisper"}
    assert {one["id"] for one in told("models", "QWEN3", "8b")} == {"Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base"}


@pytest.mark.parametrize("said", [["a100-80gb-sxm"], ["NVIDIA A100-SXM4-80GB"], ["80gb", "sxm"]])
def test_a_gpu_is_found_by_its_own_and_by_other_peoples_names(said: list[str]) -> None:
    (gpu,) = told("gpus", *said)
    assert gpu["name"] == "a100-80gb-sxm"
    assert gpu["memory_bytes"] == 80 << 30
    assert gpu["bf16_flops"] == 312e12


def test_a_core_is_no_gpu() -> None:
    assert "cpu" not in {one["name"] for one in told("gpus")}


@pytest.mark.parametrize("asked", ["models", "gpus"])
def test_an_unknown_name_is_refused_in_one_line(asked: str) -> None:
    ran = CliRunner().invoke(app, [asked, "no-such-thing"])
    assert ran.exit_code != 0
    assert not ran.stdout
    assert ran.stderr.startswith("error: no ")
    assert "no-such-thing" in ran.stderr
    assert ran.stderr.count("\n") == 1

"""QLoRA of a mixture of experts: estimate, quote and preflight refuse it in the words of the trainer."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from broker.cli.main import app
from broker.domain.errors import InvalidInput
from broker.domain.spec import JobSpec
from broker.preflight.check import preflight
from broker.preflight.dataset import summarise
from broker.preflight.model_lookup import resolve_for
from trainer.contract.architectures import QUANTISED_EXPERTS, is_mixture

MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {"num_experts": 128},
    "deepseek_v3": {"n_routed_experts": 256},
    "gpt_oss": {"num_local_experts": 32},
    "granitemoe": {"num_local_experts": 40},
    "ernie4_5_moe": {"moe_num_experts": 64, "num_hidden_layers": 28, "hidden_size": 2560, "num_attention_heads": 20},
    "dbrx": {"ffn_config": {"moe_num_experts": 16}},
    "llama4": {"text_config": {"model_type": "llama4_text", "num_local_experts": 16}},
    "nemotron_h": {"n_routed_experts": 8, "hybrid_override_pattern": "ME*-"},
}
"""Fields of published configs that say that a model is a mixture, by family."""


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["estimate", *words, "--seq", "64"])


@pytest.mark.parametrize("family", MIXTURES)
def test_an_estimate_refuses_qlora_of_a_mixture(family: str) -> None:
    config = json.dumps({"model_type": family, **MIXTURES[family]})
    for words in (["--method", "qlora"], ["--method", "lora8"], ["--method", "qlora", "--recipe", "trl"]):
        refused = run("--config", config, *words)
        assert refused.exit_code == 2
        assert refused.stderr.strip().endswith(f"--method {words[1]}: {QUANTISED_EXPERTS}")
    scaled = ["--what-if", "gpus=1,2", "--gpu", "h100-sxm"]
    assert QUANTISED_EXPERTS in run("--config", config, "--method", "qlora", *scaled).stderr
    assert QUANTISED_EXPERTS not in run("--config", config, "--method", "lora").stderr


def test_experts_that_are_linear_modules_are_estimated() -> None:
    """Experts are linear modules in transformers 4, and in libraries with model code of their own."""
    for words in (["--stack", "transformers=4.48.1"], ["--recipe", "litgpt"]):
        ran = run("mistralai/Mixtral-8x7B-v0.1", "--method", "qlora", *words)
        assert ran.exit_code == 0, ran.stderr


@pytest.mark.parametrize("family", MIXTURES)
async def test_a_quote_refuses_qlora_of_a_mixture(family: str, tmp_path: Path) -> None:
    """The quote and `submit` check in the same way; a family without a memory model is refused too."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **MIXTURES[family]}))
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    train = {"model": str(tmp_path), "data": {"path": "a.csv", "completion": "{x}", "eval_share": 0}, "global_batch": 1}
    summary = summarise(b"x\nw1 w2\n", "csv")
    lora, quantised = (
        JobSpec.model_validate({"name": "job", "cap_usd": "5", "train": train | {"method": {"kind": kind}}})
        for kind in ("lora", "qlora")
    )
    resolve = partial(resolve_for, hub=None)
    assert (await preflight(lora, summary=summary, resolve=resolve)).report is not None
    with pytest.raises(InvalidInput) as caught:
        await preflight(quantised, summary=summary, resolve=resolve)
    (problem,) = caught.value.problems
    assert (problem.field, problem.message) == ("train.method.kind", QUANTISED_EXPERTS)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "nemotron_h", "n_routed_experts": 8, "hybrid_override_pattern": "M*-M*-"},
        {"model_type": "nemotron_h", "n_routed_experts": 8, "layers_block_type": ["mlp", "linear_attention"]},
        {"model_type": "granitemoehybrid", "num_local_experts": 0},
        {"model_type": "jamba", "num_experts": 1},
        {"model_type": "gemma4", "text_config": {"num_experts": None}},
    ],
)
def test_a_number_without_layers_of_experts_is_no_mixture(config: dict[str, Any]) -> None:
    assert not is_mixture(config)

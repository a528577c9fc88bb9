"""The whole check before a purchase."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.domain.errors import InvalidInput
from broker.domain.spec import JobSpec
from broker.domain.workload import ModelShape
from broker.preflight.check import preflight
from broker.preflight.dataset import summarise
from broker.preflight.model_lookup import Unshaped, resolve_for
from trainer.contract.train import TrainConfig

SUMMARY = summarise(json.dumps([{"t": "word " * 100, "n": n} for n in range(100)]).encode(), "json")


def spec(**train: Any) -> JobSpec:
    wanted = {"model": "openai-community/gpt2", "data": {"path": "a.csv", "completion": "{t}"}, **train}
    return JobSpec.model_validate({"name": "job", "cap_usd": "5", "train": wanted})


async def offline(config: TrainConfig) -> ModelShape | Unshaped:
    return await resolve_for(config, hub=None)


async def test_a_job_becomes_a_workload_and_a_report() -> None:
    check = await preflight(spec(), summary=SUMMARY, resolve=offline)
    assert check.report is not None
    assert check.workload.steps == 12  # 95 rows to train on, by 8
    assert check.workload.tokens_per_row == pytest.approx(500 / 3.6)
    assert check.workload.shape is not None
    assert check.workload.shape.family == "gpt2"


async def test_a_script_is_not_checked() -> None:
    script = JobSpec.model_validate({"name": "s", "cap_usd": "1", "script": {"code": "x", "command": ["true"]}})
    check = await preflight(script, summary=None, resolve=offline)
    assert (check.workload.method, check.report) == ("script", None)


@pytest.mark.parametrize(
    ("train", "summary", "field"),
    [
        ({}, None, "train.data.path"),
        ({"data": {"path": "a.csv", "completion": "{x}"}, "model": "un/known"}, SUMMARY, "train.data.completion"),
        ({"model": "un/known"}, SUMMARY, "train.model"),
        ({"samples": {"prompts": ["a", " "]}}, SUMMARY, "train.samples.prompts"),
    ],
)
async def test_faults_are_named_the_data_first(train: dict[str, Any], summary: Any, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        await preflight(spec(**train), summary=summary, resolve=offline)
    assert caught.value.problems[0].field == field


@pytest.mark.parametrize(
    ("train", "unit"), [({"global_batch": 8}, 3), ({"global_batch": 6, "micro_batch": 3}, 9), ({}, 3)]
)
async def test_nodes_that_cannot_take_equal_parts_of_a_step(train: dict[str, Any], unit: int) -> None:
    """The spec itself is read, as that of a job that was taken under another rule must be."""
    three = JobSpec.model_validate(spec(**train).model_dump() | {"resources": {"nodes": 3}})
    with pytest.raises(InvalidInput, match=f"3 nodes .* give a multiple of {unit}") as caught:
        await preflight(three, summary=SUMMARY, resolve=offline)
    assert caught.value.problems[0].field == "train.global_batch"
    even = JobSpec.model_validate(three.model_dump() | {"train": spec(**train | {"global_batch": 9}).train})
    await preflight(even, summary=SUMMARY, resolve=offline)


async def test_rows_longer_than_the_models_positions() -> None:
    long = summarise(json.dumps([{"t": "word " * 2000} for _ in range(100)]).encode(), "json")
    with pytest.raises(InvalidInput, match="gpt2 has 1024 positions") as caught:
        await preflight(spec(max_length=4096), summary=long, resolve=offline)
    assert caught.value.problems[0].field == "train.max_length"
    assert (await preflight(spec(max_length=1024), summary=long, resolve=offline)).workload.sequence == 1024


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({"model_type": "opt", "hidden_size": 768, "ffn_dim": 3072, "max_position_embeddings": 2048}, 2048),
        ({"model_type": "openai-gpt", "n_embd": 768, "n_positions": 512}, 512),
        ({"model_type": "mamba", "hidden_size": 768}, None),
    ],
)
async def test_rows_longer_than_the_positions_of_a_model_that_is_not_estimated(
    tmp_path: Path, config: dict[str, Any], most: int | None
) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    (tmp_path / "config.json").write_text(json.dumps(config))
    long = summarise(json.dumps([{"t": "word " * 8000} for _ in range(100)]).encode(), "json")
    job = spec(model=str(tmp_path), max_length=4096)
    if most is None:
        assert (await preflight(job, summary=long, resolve=offline)).workload.sequence == 4096
        return
    with pytest.raises(InvalidInput, match=f"has {most} positions; lower it") as caught:
        await preflight(job, summary=long, resolve=offline)
    assert caught.value.problems[0].field == "train.max_length"


async def test_a_task_that_is_not_estimated_says_so() -> None:
    async def nothing(config: TrainConfig) -> ModelShape | Unshaped:
        return Unshaped(name="some")

    data = {"path": "a.csv", "prompt": "{t}", "label": "n"}
    check = await preflight(spec(task="text_regression", data=data), summary=SUMMARY, resolve=nothing)
    assert (check.workload.shape, check.workload.steps) == (None, 12)
    assert check.workload.unestimated == "task text_regression of such a model"


async def test_missing_adapter_targets_are_refused_before_any_purchase() -> None:
    """Targets that the architecture lacks are refused before anything is bought."""
    llama = "HuggingFaceTB/SmolLM2-135M"
    good = {"kind": "qlora", "targets": ["self_attn.q_proj", "down_proj", "lm_head"]}
    check = await preflight(spec(model=llama, method=good), summary=SUMMARY, resolve=offline)
    assert check.workload.method == "qlora"
    for kind, targets, wrong in (
        ("lora", ["q_proj", "c_attn"], "'c_attn'"), ("qlora", ["c_attn"], "'c_attn'"),
        ("lora", ["q_proj", "embed_tokens"], "'embed_tokens'"), ("lora", ["mlp.q_proj"], "'mlp.q_proj'"),
    ):  # fmt: skip
        method = {"kind": kind, "targets": targets}
        with pytest.raises(InvalidInput, match=wrong + r" matches no linear module .* it has q_proj, k_proj") as caught:
            await preflight(spec(model=llama, method=method), summary=SUMMARY, resolve=offline)
        assert caught.value.problems[0].field == "train.method.targets"


async def test_an_unknown_architecture_accepts_any_module_name() -> None:
    async def unknown(config: TrainConfig) -> ModelShape | Unshaped:
        shape = await offline(config)
        assert isinstance(shape, ModelShape)
        return replace(shape, family="unheard_of", known=False)

    method = {"kind": "lora", "targets": ["wq"]}
    check = await preflight(spec(method=method), summary=SUMMARY, resolve=unknown)
    assert check.workload.lora_targets == "wq"


async def test_experts_are_not_quantised_so_a_qlora_of_a_mixture_is_refused() -> None:
    async def mixture(config: TrainConfig) -> ModelShape | Unshaped:
        shape = await offline(config)
        assert isinstance(shape, ModelShape)
        return replace(shape, name="mix", experts=8, active_experts=2)

    with pytest.raises(InvalidInput, match="the experts of a mixture are not linear; use lora") as caught:
        await preflight(spec(method={"kind": "qlora"}), summary=SUMMARY, resolve=mixture)
    assert caught.value.problems[0].field == "train.method.kind"

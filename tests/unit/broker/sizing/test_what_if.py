"""The scaling table as a document, as a plot, and what it refuses."""

import json
from typing import Any

import pytest

from broker.domain.workload import Plan, Workload
from broker.estimator.memory.estimate import EstimateOptions
from broker.estimator.planning.plan_search import Planner
from broker.estimator.speed.hardware import TABLE
from broker.notify.plot import scaling_png
from broker.sizing.estimate import EstimateError, config_of, estimate, hardware_of, model_shape
from broker.sizing.what_if import what_if, what_if_of_spec
from trainer.contract.train import TrainConfig

MODEL = "mistralai/Mistral-7B-v0.1"
ASK = EstimateOptions(method="qlora", length=1024)


def test_the_document_has_a_row_for_each_count_and_its_assumptions() -> None:
    found = what_if("gpus=1,8", model=MODEL, gpu="h100-sxm", ask=ASK, rows=8000, usd_per_gpu_hour=2.0)
    one, eight = json.loads(json.dumps(found))["points"]
    assert (one["gpus"], eight["gpus"], found["global_batch"], found["steps"]) == (1, 8, 8, 1000)
    assert one["plan"]["parallelism"] == "single"
    assert all(sum(row["memory_bytes"].values()) == row["need_bytes"] for row in (one, eight))
    assert found["gpu_memory_bytes"] == hardware_of("h100-sxm").memory_bytes  # type: ignore[union-attr]
    low, high = eight["tokens_per_s_interval"]
    assert low < eight["tokens_per_s"] < high
    assert eight["usd"] == pytest.approx(eight["hours"] * 16)
    assert any("set-up" in text for text in found["assumptions"])
    untimed = what_if("gpus=1,8", model=MODEL, gpu="h100-sxm", ask=ASK)
    assert {row["hours"] for row in untimed["points"]} == {None}


def test_the_scaling_table_is_plotted() -> None:
    pytest.importorskip("matplotlib")
    found = what_if("gpus=1,2,8", model=MODEL, gpu="h100-sxm", ask=ASK)
    picture = scaling_png(found)
    assert picture is not None
    assert picture.startswith(b"\x89PNG")
    assert scaling_png({**found, "points": []}) is None


def test_a_spec_is_asked_as_its_job_would_run() -> None:
    train = TrainConfig.model_validate(
        {
            "model": MODEL, "data": {"path": "a.csv", "completion": "{a}"}, "global_batch": 64, "max_length": 1024,
            "method": {"kind": "lora", "r": 8, "targets": "attention"},
        }
    )  # fmt: skip
    hardware = hardware_of("l40s")
    assert hardware is not None
    shape = model_shape(*config_of(MODEL, None))
    found = what_if_of_spec("gpus=1,2", train, shape, hardware, mean_tokens=300.0, steps=10, usd_per_gpu_hour=None)
    assert (found["global_batch"], found["tokens_per_row"], found["method"]) == (64, 300.0, "lora")
    assert all(row["plan"] and row["usd"] is None for row in found["points"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpu": None}, "give --gpu"),
        ({"gpu": "tpu"}, "--gpu tpu: not known"),
        ({"counts_text": "gpus=none"}, "none is not a number of GPUs"),
        ({"global_batch": 0}, "--global-batch 0: must be from 1 to 1000000000"),
        ({"global_batch": 10**10}, "--global-batch 10000000000: must be from 1 to"),
        ({"rows": -1}, "--rows -1: must be from 1 to"),
        ({"rows": 10**27}, "must be from 1 to 1000000000000000"),
        ({"usd_per_gpu_hour": -1.0}, "--usd-per-gpu-hour -1: must be from 0 to 1000000"),
        ({"usd_per_gpu_hour": 1e308}, "--usd-per-gpu-hour 1e\\+308: must be from 0 to 1000000"),
        ({"usd_per_gpu_hour": float("nan")}, "--usd-per-gpu-hour nan: must be from 0"),
        ({"ask": EstimateOptions(rows=0)}, "--micro-batch 0: must be at least 1"),
        ({"model": "openai/whisper-small"}, "--what-if: no basis: no run of such a model was measured; leave it out"),
        ({"ask": EstimateOptions(length=10**6)}, "--seq 1000000: the model has"),
        ({"model": "nobody/nothing"}, "nobody/nothing: not in the bundled catalogue"),
    ],
)
def test_bad_input_is_one_line_that_names_it(change: dict[str, object], words: str) -> None:
    asked = {"counts_text": "gpus=1", "model": MODEL, "gpu": "l40s", "ask": ASK} | change
    with pytest.raises(EstimateError, match=words) as refused:
        what_if(**asked)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


def test_a_specs_encoder_decoder_is_scaled_by_both_lengths() -> None:
    shape, h100 = model_shape(*config_of("google/flan-t5-base", None)), hardware_of("h100-sxm")
    assert h100 is not None
    train = TrainConfig.model_validate(
        {"model": "m", "task": "seq2seq", "data": {"path": "a.csv", "prompt": "{x}", "completion": "{y}"},
         "max_length": 256, "method": {"kind": "full"}}
    )  # fmt: skip
    found = what_if_of_spec(
        "gpus=1,2", train, shape, h100, mean_tokens=200, generated_tokens=30, steps=10, usd_per_gpu_hour=1.0
    )
    assert found["tokens_per_row"] == 230
    assert all(row["usd"] > 0 for row in found["points"])


def test_a_specs_own_method_targets_and_optimizer_are_asked_for() -> None:
    shape, h100 = model_shape(*config_of(MODEL, None)), hardware_of("h100-sxm")
    assert h100 is not None

    def asked(**method: object) -> dict[str, object]:
        train = TrainConfig.model_validate(
            {"model": "m", "data": {"path": "a.csv", "completion": "{x}"}, "method": method, "max_length": 256}
        )
        return what_if_of_spec("gpus=1", train, shape, h100, mean_tokens=100, steps=10, usd_per_gpu_hour=None)

    every, some = asked(kind="qlora"), asked(kind="qlora", targets=["q_proj", "self_attn.v_proj"])
    assert every["method"] == some["method"] == "qlora"
    assert some["points"][0]["need_bytes"] < every["points"][0]["need_bytes"]  # type: ignore[index]
    (eight_bits,) = asked(kind="qlora", bits=8)["points"]  # type: ignore[misc]
    assert eight_bits["tokens_per_s_evidence"] == "unchecked"
    assert "no run on an 8-bit base was measured" in eight_bits["tokens_per_s_basis"]
    with pytest.raises(EstimateError, match="DoRA is not estimated"):
        asked(kind="lora", dora=True)


SHAPE = model_shape(*config_of(MODEL, None))


def by_quote(method: Any, plan: Plan, nodes: int) -> float:
    """Return tokens/s of all GPUs as a quote's line has them for rows of 1024 tokens."""
    work = Workload(
        shape=SHAPE, method=method, lora_r=16, micro_batch=plan.micro_batch, global_batch=32, sequence=1024,
        tokens_per_row=1024.0, gradient_checkpointing=plan.gradient_checkpointing,
    )  # fmt: skip
    return 32 * 1024 / Planner(work).timing(plan, TABLE["h100-sxm"], nodes).step_s


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_estimate_what_if_and_quote_say_the_same_of_the_same_plan(method: Any) -> None:
    table = what_if(
        "gpus=8,16", model=MODEL, gpu="h100-sxm", ask=EstimateOptions(method=method, length=1024), global_batch=32
    )
    for row in table["points"]:
        plan = Plan(**row["plan"])
        assert (plan.accumulation, row["nodes"]) == (1, row["gpus"] // 8)
        alone = estimate(
            MODEL, gpu="h100-sxm", method=method, seq=1024, micro_batch=plan.micro_batch, gpus=plan.devices,
            nodes=row["nodes"], sharding=plan.parallelism, gradient_checkpointing=plan.gradient_checkpointing,
        )  # fmt: skip
        speed = ("tokens_per_s", "tokens_per_s_interval", "tokens_per_s_evidence", "tokens_per_s_basis")
        assert {name: alone[name] for name in speed} == {name: row[name] for name in speed}
        assert alone["tokens_per_s"] == pytest.approx(by_quote(method, plan, row["nodes"]), abs=0.1)


@pytest.mark.parametrize("way", ["ddp", "fsdp", "hybrid"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_multi_node_speed_is_limited_by_its_stated_network(way: Any, method: Any) -> None:
    """Several machines are slower because of their network, and the answer names the assumed network."""
    asked: dict[str, Any] = {
        "gpu": "l40s", "method": method, "seq": 1024, "micro_batch": 2, "gpus": 16, "sharding": way,
    }  # fmt: skip
    two = estimate(MODEL, nodes=2, **asked)
    four = estimate(MODEL, nodes=4, **asked)
    plan = Plan(parallelism=way, devices=16, micro_batch=2)
    assert two["tokens_per_s"] != four["tokens_per_s"]
    if way != "hybrid":  # which has no form on one machine
        assert estimate(MODEL, **asked)["tokens_per_s"] > two["tokens_per_s"] > 0
    links = "assumed: machines of 8 GPUs; within them 32 GB/s a GPU and direction, between them 12.5 GB/s a machine"
    assert links in two["notes"]
    work = Workload(
        shape=SHAPE, method=method, lora_r=16, micro_batch=2, global_batch=32, sequence=1024, tokens_per_row=1024.0
    )
    quoted = 32 * 1024 / Planner(work).timing(plan, TABLE["l40s"], 2).step_s
    assert two["tokens_per_s"] == pytest.approx(quoted, abs=0.1)


def test_a_plan_that_does_not_fit_has_no_speed() -> None:
    (row,) = what_if("gpus=1", model=MODEL, gpu="l4", ask=EstimateOptions(method="full", length=1024), rows=10)[
        "points"
    ]
    unknown = ("plan", "step_s", "tokens_per_s", "tokens_per_s_interval", "tokens_per_s_evidence", "hours", "usd")
    assert {row[name] for name in unknown} == {None}
    assert (row["tokens_per_s_basis"], row["plan"]) == ("does not fit", None)

"""The scaling table as a document, as a plot, and what it refuses."""

import json

import pytest

from broker.decide.estimate import Ask
from broker.notify.plot import scaling_png
from broker.sizing import BadAsk, config_of, hardware_of, model_shape
from broker.whatif import of_spec, what_if
from trainer.contract.train import TrainConfig

MODEL = "mistralai/Mistral-7B-v0.1"
ASK = Ask(method="qlora", length=1024)


def test_the_document_has_a_row_for_each_count_and_its_assumptions() -> None:
    found = what_if("gpus=1,8", model=MODEL, gpu="h100-sxm", ask=ASK, rows=8000, usd_per_gpu_hour=2.0)
    one, eight = json.loads(json.dumps(found))["points"]
    assert (one["gpus"], eight["gpus"], found["global_batch"], found["steps"]) == (1, 8, 8, 1000)
    assert one["plan"]["parallelism"] == "single"
    low, high = eight["tokens_per_s_interval"]
    assert low < eight["tokens_per_s"] < high
    assert eight["usd"] == pytest.approx(eight["hours"] * 16)
    assert any("set-up" in text for text in found["assumptions"])
    untimed = what_if("gpus=1,8", model=MODEL, gpu="h100-sxm", ask=ASK)
    assert {row["hours"] for row in untimed["points"]} == {None}


def test_a_plot_of_it() -> None:
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
    found = of_spec("gpus=1,2", train, shape, hardware, mean=300.0, steps=10, usd_per_gpu_hour=None)
    assert (found["global_batch"], found["tokens_per_row"], found["method"]) == (64, 300.0, "lora")
    assert all(row["runnable"] and row["usd"] is None for row in found["points"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpu": None}, "give --gpu"),
        ({"gpu": "tpu"}, "--gpu tpu: not known"),
        ({"said": "gpus=none"}, "none is no number of GPUs"),
        ({"global_batch": 0}, "--global-batch 0: must be at least 1"),
        ({"rows": -1}, "--rows -1: must be at least 1"),
        ({"usd_per_gpu_hour": -1.0}, "--usd-per-gpu-hour -1: must be 0 or more"),
        ({"ask": Ask(length=10**6)}, "--seq 1000000: the model has"),
        ({"model": "nobody/nothing"}, "nobody/nothing: not in the bundled catalogue"),
    ],
)
def test_bad_input_is_one_line_that_names_it(change: dict[str, object], words: str) -> None:
    asked = {"said": "gpus=1", "model": MODEL, "gpu": "l40s", "ask": ASK} | change
    with pytest.raises(BadAsk, match=words) as refused:
        what_if(**asked)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


def test_a_specs_encoder_decoder_is_asked_by_what_it_reads_and_writes() -> None:
    shape, h100 = model_shape(*config_of("google/flan-t5-base", None)), hardware_of("h100-sxm")
    assert h100 is not None
    train = TrainConfig.model_validate(
        {"model": "m", "task": "seq2seq", "data": {"path": "a.csv", "prompt": "{x}", "completion": "{y}"},
         "max_length": 256, "method": {"kind": "full"}}
    )  # fmt: skip
    found = of_spec("gpus=1,2", train, shape, h100, mean=200, written=30, steps=10, usd_per_gpu_hour=1.0)
    assert found["tokens_per_row"] == 230
    assert all(row["usd"] > 0 for row in found["points"])


def test_a_specs_own_method_targets_and_optimizer_are_asked_for() -> None:
    shape, h100 = model_shape(*config_of(MODEL, None)), hardware_of("h100-sxm")
    assert h100 is not None

    def asked(**method: object) -> dict[str, object]:
        train = TrainConfig.model_validate(
            {"model": "m", "data": {"path": "a.csv", "completion": "{x}"}, "method": method, "max_length": 256}
        )
        return of_spec("gpus=1", train, shape, h100, mean=100, steps=10, usd_per_gpu_hour=None)

    every, some = asked(kind="qlora"), asked(kind="qlora", targets=["q_proj", "self_attn.v_proj"])
    assert every["method"] == some["method"] == "qlora"
    assert some["points"][0]["need_bytes"] < every["points"][0]["need_bytes"]  # type: ignore[index]
    with pytest.raises(BadAsk, match="no run on an 8-bit base was measured"):
        asked(kind="qlora", bits=8)
    with pytest.raises(BadAsk, match="DoRA is not estimated"):
        asked(kind="lora", dora=True)

"""Input of `estimate` in others' terms: optimizers of transformers, several packages, quantised configs."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from broker.cli.main import app
from broker.estimator.memory.estimate import OPTIMIZERS, EstimateOptions
from broker.sizing.estimate import EstimateError, estimate
from broker.sizing.hf_aliases import HF_OPTIMIZERS
from broker.sizing.what_if import what_if

TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 1000, "num_hidden_layers": 5, "max_position_embeddings": 512,
}  # fmt: skip
OLD = {"seq": 128, "stack": "transformers=4.48.1"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}


def peak(**asked: Any) -> int:
    return int(estimate(config=TINY, **{**OLD, **asked})["peak_allocated_bytes"])


@pytest.mark.parametrize(
    "stack",
    [
        "transformers==4.48.1", " transformers = 4.48.1 ", "transformers=4.48.1,peft=0.14.0",
        "peft==0.14,Transformers=4.48.1",
        "transformers=4.48.1+cu121", "transformers=4.48.0.dev0", "transformers=4.48.1rc1", "transformers=4.48.1.post2",
    ],
)  # fmt: skip
def test_a_stack_is_read_however_it_is_written(stack: str) -> None:
    assert peak(stack=stack) == peak() != peak(stack="transformers=4.49.0.dev0")
    notes = estimate(config=TINY, **{**OLD, "stack": stack})["notes"]
    assert [note for note in notes if "changes nothing" in note] == [
        f"--stack peft={version}: changes nothing here; only the version of transformers does"
        for version in ("0.14.0", "0.14")
        if f"={version}," in f"{stack},"
    ]


def test_without_a_version_of_transformers_the_step_is_the_trainers() -> None:
    assert peak(stack="peft=0.14.0") == peak(stack=None)


@pytest.mark.parametrize(
    ("stack", "told"),
    [
        ("", "--stack : write transformers=VERSION"), ("transformers", "write transformers=VERSION"),
        ("transformers=4.48.1,", "write transformers=VERSION"), ("transformers===4.48.1", "write transformers=VERSION"),
        ("transformers=4.48.1,transformers=4.49.0", "has two versions of transformers"),
        ("transformers=latest", "--stack transformers=latest: not a version"),
        ("transformers=4.48.1 or so", "write transformers=VERSION"),
    ],
)  # fmt: skip
def test_an_invalid_stack_is_refused_in_one_line(stack: str, told: str) -> None:
    with pytest.raises(EstimateError, match=told):
        estimate(config=TINY, seq=128, stack=stack)


def test_the_command_accepts_several_stack_options() -> None:
    words = [
        "--config",
        json.dumps(TINY),
        "--seq",
        "128",
        "--stack",
        "transformers=4.48.1",
        "--stack",
        "torch=2.5",
        "--json",
    ]
    document = json.loads(CliRunner().invoke(app, ["estimate", *words]).stdout)
    assert document["peak_allocated_bytes"] == peak()
    assert document["notes"] == ["--stack torch=2.5: changes nothing here; only the version of transformers does"]


@pytest.mark.parametrize(("theirs", "ours"), HF_OPTIMIZERS.items())
def test_an_optimizer_is_known_by_transformers_name(theirs: str, ours: str) -> None:
    names = pytest.importorskip("transformers.training_args").OptimizerNames
    assert theirs in {name.value for name in names}
    assert ours in OPTIMIZERS
    assert peak(method="full", optimizer=theirs) == peak(method="full", optimizer=ours)
    notes = estimate(config=TINY, seq=128, optimizer=theirs)["notes"]
    assert any("moves to the host" in note for note in notes) == (theirs == "paged_adamw_8bit")


def test_unknown_optimizers_are_refused_with_the_choices() -> None:
    with pytest.raises(EstimateError, match="--optimizer lion_8bit: not one of adamw_fused"):
        estimate(config=TINY, seq=128, optimizer="lion_8bit")


def test_a_config_may_begin_with_a_mark(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8-sig")
    assert estimate(config=tmp_path, **OLD)["peak_allocated_bytes"] == peak()


@pytest.mark.parametrize("said", [NF4, {"load_in_4bit": True}])
def test_a_config_of_4_bits_is_that_of_qlora(said: dict[str, Any]) -> None:
    estimated = estimate(config={**TINY, "quantization_config": said}, method="qlora", **OLD)
    assert estimated["peak_allocated_bytes"] == peak(method="qlora")
    assert [note.endswith("estimated as quantised too") for note in estimated["notes"]] == [said is not NF4]
    table = what_if(
        "gpus=1",
        config={**TINY, "quantization_config": said},
        gpu="l40s",
        ask=EstimateOptions(method="qlora", length=128),
    )
    assert table["method"] == "qlora"


@pytest.mark.parametrize(
    ("said", "method"),
    [
        (NF4, "lora"), (NF4, "lora8"), ({**NF4, "load_in_4bit": False, "load_in_8bit": True}, "qlora"),
        ({"quant_method": "gptq", "bits": 4}, "qlora"), ({**NF4, "quant_method": "awq"}, "qlora"),
    ],
)  # fmt: skip
def test_other_quantisations_are_refused(said: dict[str, Any], method: str) -> None:
    with pytest.raises(EstimateError, match="is quantised; give the model that it was made from"):
        estimate(config={**TINY, "quantization_config": said}, method=method, seq=128)

"""`broker.estimate()` and `gpubroker estimate`: from a config to one document, offline."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import broker
from broker.cli.main import app
from broker.domain.offer import GIB
from broker.estimator.speed.calibration import SPREAD_OTHER_CODE
from broker.sizing import traced_run as tracer
from broker.sizing.estimate import EstimateError, estimate
from trainer.contract.train import TrainConfig

MISTRAL = "mistralai/Mistral-7B-v0.1"
TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 1000, "num_hidden_layers": 5, "max_position_embeddings": 512,
}  # fmt: skip
AS_MEASURED = [
    *("--method", "lora", "--optimizer", "adamw_foreach", "--precision", "bf16", "--seq", "4096", "--micro-batch", "4"),
    *("--gpus", "1", "--sharding", "none", "--gradient-checkpointing", "--lora-r", "16", "--lora-dropout", "0.1"),
    *(
        "--lora-targets",
        "q_proj,k_proj,v_proj,o_proj",
        "--stack",
        "transformers=4.48.1",
        "--gpu",
        "A100-80GB",
        "--json",
    ),
]


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["estimate", *words])


def test_the_stable_call_answers_with_its_fields() -> None:
    """Mistral-7B on an A100: 26,704,571,904 bytes allocated, 29,576 MiB shown (fms-acceleration, 876e2ed)."""
    ran = run(MISTRAL, *AS_MEASURED)
    assert ran.exit_code == 0
    document = json.loads(ran.stdout)
    assert document["peak_allocated_bytes"] == pytest.approx(26_704_571_904, rel=0.02)
    assert document["device_used_bytes"] == pytest.approx(29_576 * 2**20, rel=0.05)
    assert set(document["by_category"]) == {
        *("weights", "gradients", "optimizer", "activations", "logits", "temporary", "communication", "context")
    }
    assert sum(document["by_category"].values()) == document["device_used_bytes"]
    assert (document["evidence"], document["margin_pct"]) == ("measured", 3.0)
    low, high = document["tokens_per_s_interval"]
    assert low < document["tokens_per_s"] < high
    assert document["fits"] is True


def test_a_config_is_taken_from_a_file_a_folder_and_inline(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    peaks = {
        json.loads(run("--config", given, "--seq", "128", "--json").stdout)["peak_allocated_bytes"]
        for given in (str(tmp_path / "config.json"), str(tmp_path), json.dumps(TINY))
    }
    by_model = estimate(str(tmp_path), seq=128)["peak_allocated_bytes"]
    assert peaks == {by_model, estimate(config=TINY, seq=128)["peak_allocated_bytes"]}


def test_the_assumed_recipe_is_shown_and_a_field() -> None:
    assert json.loads(run(MISTRAL, *AS_MEASURED).stdout)["recipe"] == "gpubroker"
    shown = run(MISTRAL, "--method", "qlora", "--recipe", "peft-kbit").stdout
    assert "recipe: peft-kbit" in shown
    assert "recipe peft-kbit by formula, from the code of peft" in shown
    refused = run("--config", '{"model_type": "whisper"}', "--recipe", "trl")
    assert refused.exit_code == 2
    assert "--recipe trl: known for decoder language models only" in refused.stderr


def test_the_estimate_is_shown_as_a_table_with_its_evidence() -> None:
    ran = run(MISTRAL, "--gpu", "l40s", "--lora-targets", "q_proj,c_attn")
    assert ran.exit_code == 0
    for words in (
        "in nvidia-smi",
        "peak in: forward head",
        "evidence: traced",
        "l40s: ",
        "c_attn matches no module",
    ):
        assert words in ran.stdout
    assert "tokens/s: unknown: no --gpu was given" in run(MISTRAL).stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--config", "/no/such/config.json"], "/no/such/config.json: No such file"),
        (["--config", "{"], "--config: is not JSON"),
        (["--config", '{"model_type": "own"}'], "no positive num_hidden_layers, and 'own' is not an architecture that"),
        (["--config", '{"peft_type": "LORA"}'], "no positive num_hidden_layers, so it is not a model's"),
        (["--config", json.dumps(TINY | {"hidden_size": -256})], "no positive hidden_size"),
        (["--config", json.dumps(TINY | {"vocab_size": 0})], "no positive vocab_size"),
        (["--config", json.dumps(TINY | {"num_experts": 8})], "mixture of experts"),
        (
            ["--config", json.dumps(TINY | {"num_attention_heads": 7})],
            "hidden_size of 256, which 7 heads do not divide",
        ),
        (["--config", json.dumps(TINY | {"num_key_value_heads": 3})], "8 heads, which 3 heads of keys do not divide"),
        (["--config", json.dumps(TINY), "--seq", "513"], "--seq 513: the model has 512 positions; give no more"),
        ([""], "give either a MODEL"),
        (["--config", ""], "give either a MODEL"),
        (["--config", json.dumps(TINY), "--seq", "-1"], "--seq -1: must be at least 1"),
        (["--config", json.dumps(TINY), "--seq", "9", "--micro-batch", "0"], "--micro-batch 0"),
        (["--config", json.dumps(TINY), "--seq", "9", "--lora-targets", "wq"], "wq matches no module of llama"),
        (["--config", json.dumps(TINY), "--seq", "9", "--stack", "torch"], "--stack torch: write transformers="),
        (["--config", json.dumps(TINY), "--seq", "9", "--method", "x"], "--method x: not one of full"),
        (["no/such-model"], "no/such-model: not in the bundled catalogue"),
        ([], "give either a MODEL"),
        ([MISTRAL, "--config", "x"], "give either a MODEL"),
    ],
)
def test_bad_input_is_one_line_that_names_it(words: list[str], told: str) -> None:
    ran = run(*words)
    assert ran.exit_code == 2
    assert told in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_a_missing_config_field_is_a_reported_default() -> None:
    """transformers writes only what differs from its class: MistralConfig() is a Mistral-7B."""
    estimated = estimate(config={"model_type": "mistral", "max_position_embeddings": 32768}, seq=512)
    assert estimated["parameters"] == 7_241_732_096
    assert "lacks num_hidden_layers, hidden_size" in estimated["notes"][0]
    assert "mistral's defaults" in estimated["notes"][0]
    few = estimate(config={"model_type": "mistral", "num_attention_heads": 4, "hidden_size": 256}, seq=512)
    assert "num_key_value_heads" not in few["notes"][0]


def test_a_file_that_is_no_text_and_json_that_is_no_object_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for content, told in ((b"\xff\xfe\x00", "is not text"), (b"[1]", "is not a JSON object")):
        file.write_bytes(content)
        with pytest.raises(EstimateError, match=told):
            estimate(config=file)


@pytest.mark.parametrize("more", [{"sharding": "hybrid", "offload": True}, {"sharding": "tensor"}, {"gpus": 32_768}])
def test_no_speed_is_given_for_options_outside_the_speed_model(more: dict[str, Any]) -> None:
    estimated = estimate(MISTRAL, gpu="h100-sxm", **{"gpus": 16, "nodes": 2, **more})
    assert (estimated["tokens_per_s"], estimated["tokens_per_s_evidence"]) == (None, None)
    assert "no basis" in estimated["tokens_per_s_basis"]


def test_a_mixture_of_experts_is_estimated_and_its_speed_is_uncertain() -> None:
    asked: dict[str, Any] = {"gpu": "a100-80gb-sxm", "method": "qlora", "gradient_checkpointing": True}
    estimated = estimate("mistralai/Mixtral-8x7B-v0.1", **asked, stack="transformers=4.48.1")
    assert estimated["parameters"] == 46_702_792_704
    low, high = estimated["tokens_per_s_interval"]
    assert high / low == pytest.approx(SPREAD_OTHER_CODE**2, rel=1e-3)
    assert "only active experts are counted" in estimated["tokens_per_s_basis"]
    assert 25 * GIB < estimated["peak_allocated_bytes"] < 40 * GIB


def test_the_task_decides_what_is_estimated() -> None:
    asked: dict[str, Any] = {"config": TINY, "seq": 128, "gpu": "l4"}
    tokens, reference, reward, label = (
        estimate(**asked, task=task) for task in ("causal_lm", "dpo", "reward_model", "text_classification")
    )
    assert tokens == estimate(**asked)
    pairs = estimate(**asked, micro_batch=2)
    assert reference["peak_allocated_bytes"] == pairs["peak_allocated_bytes"]
    assert reference["tokens_per_s"] < pairs["tokens_per_s"]
    assert reward["peak_allocated_bytes"] > label["peak_allocated_bytes"], "two sequences, not one"
    assert "each of 1 rows is two sequences" in reference["notes"][0]
    assert not label["notes"]
    assert "none was measured" in label["tokens_per_s_basis"]
    bert = "google-bert/bert-base-uncased"
    assert estimate(bert, seq=128, task="text_classification") == estimate(bert, seq=128)
    assert estimate(bert, seq=128, task="token_classification")["parameters"] != estimate(bert, seq=128)["parameters"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--config", json.dumps(TINY), "--task", "x"], "--task x: not one of causal_lm"),
        (["--config", json.dumps(TINY), "--task", "image_classification"], "takes a model of images"),
        (["google-bert/bert-base-uncased", "--task", "dpo"], "sees what it is to predict"),
        (["--config", '{"model_type": "swin"}', "--task", "image_classification"], "a job's first step measures it"),
        (["--config", json.dumps(TINY), "--seq", "128", "--task", "dpo", "--exact"], "no --task dpo"),
    ],
)
def test_a_task_that_cannot_be_estimated_is_one_line(words: list[str], told: str) -> None:
    ran = run(*words)
    assert (ran.exit_code, len(ran.stderr.splitlines())) == (2, 1)
    assert told in ran.stderr


def test_speed_without_a_basis_is_unknown() -> None:
    estimated = estimate(MISTRAL, gpu="a100-80gb-sxm", method="adapter", trainable_parameters=1000)
    assert (estimated["tokens_per_s"], estimated["tokens_per_s_interval"]) == (None, None)
    assert "no run of such an adapter" in estimated["tokens_per_s_basis"]


def test_speed_of_several_gpus_and_of_a_quantised_base() -> None:
    """Measured on an A100 (fms-acceleration, 876e2ed): 2904 tokens/s in 4 bits, 2777 of each of two under FSDP."""
    asked = {"seq": 4096, "gradient_checkpointing": True, "precision": "bf16", "optimizer": "adamw_foreach"}
    two, one = (
        estimate(MISTRAL, gpu="a100-80gb-sxm", method="full", micro_batch=2, gpus=n, **asked)
        for n in (2, 1)  # type: ignore[arg-type]
    )
    assert one["tokens_per_s"] < two["tokens_per_s"] < 2 * one["tokens_per_s"]
    fsdp = estimate(MISTRAL, gpu="a100-80gb-sxm", method="full", micro_batch=2, gpus=2, sharding="fsdp", **asked)  # type: ignore[arg-type]
    assert fsdp["tokens_per_s"] == pytest.approx(2 * 2777, rel=0.2)
    four_bits = estimate(
        MISTRAL, gpu="a100-80gb-sxm", method="qlora", micro_batch=4, seq=4096, gradient_checkpointing=True,
        lora_targets="q_proj,k_proj,v_proj,o_proj",
    )  # fmt: skip
    assert four_bits["tokens_per_s"] == pytest.approx(2904, rel=0.25)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"gpu": "rtx4090"}, "no measurements on RTX4090"),
        ({"gpu": "h100-sxm", "gpus": 8}, "none with DDP"),
        ({"gpu": "h100-sxm"}, "fitted on runs on the h100-sxm; nearest evidence: this GPU and family; 90 % interval"),
    ],
)
def test_speed_states_its_evidence_and_interval(asked: dict[str, Any], told: str) -> None:
    estimated = estimate(MISTRAL, micro_batch=16, **asked)
    assert told in estimated["tokens_per_s_basis"]
    low, high = estimated["tokens_per_s_interval"]
    assert low < estimated["tokens_per_s"] < high
    known = estimate(MISTRAL, micro_batch=16, gpu="a100-80gb-sxm")
    assert high / low >= known["tokens_per_s_interval"][1] / known["tokens_per_s_interval"][0] * 0.99


@pytest.mark.parametrize(
    "asked",
    [
        {"method": "lora8"}, {"optimizer": "sgd"}, {"gpus": 2, "sharding": "tensor"},
        {"gpus": 2, "sharding": "fsdp", "offload": True}, {"gpus": 2, "sharding": "fsdp", "method": "qlora"},
        {"gpus": 4, "nodes": 2, "sharding": "hybrid"}, {"method": "qlora", "norms": "half"},
        {"stack": "transformers=4.48.1"}, {"attention": "eager"}, {"recipe": "trl"},
    ],
)  # fmt: skip
def test_options_that_the_trainer_lacks_cannot_be_traced(asked: dict[str, Any]) -> None:
    with pytest.raises(EstimateError, match="--exact traces the trainer's own step"):
        estimate(config=TINY, seq=128, exact=True, **asked)


def test_fsdp_of_another_stack_is_untraced_fsdp_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "_installed", lambda: "5.17.0")
    with pytest.raises(EstimateError, match="no --stack, whose --sharding fsdp is FSDP 1; leave out --exact"):
        estimate(config=TINY, seq=128, exact=True, gpus=2, sharding="fsdp", stack="transformers=5.17.0")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"micro_batch": "4"}, "micro_batch '4': is of the type str; give int"),
        ({"seq": 1.5}, "seq 1.5: is of the type float; give int"),
        ({"gpus": True}, "gpus True: is of the type bool; give int"),
        ({"exact": 1}, "exact 1: is of the type int; give bool"),
        ({"config": 5, "model": None}, "config 5: is of the type int; give str or Path or Mapping"),
        ({"lora_dropout": None}, "lora_dropout None: is of the type NoneType; give float"),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_by_its_name(asked: dict[str, Any], told: str) -> None:
    asked = {"model": MISTRAL, **asked}
    with pytest.raises(EstimateError) as refused:
        estimate(**asked)
    assert str(refused.value) == told
    assert estimate(MISTRAL, lora_dropout=0)["peak_allocated_bytes"] > 0


def test_dpo_is_a_formula_over_the_form_and_never_full() -> None:
    plain, dpo = (estimate(MISTRAL, task=task, precision="bf16") for task in ("causal_lm", "dpo"))
    assert (dpo["evidence"], dpo["margin_pct"]) == ("formula", 10.0)
    assert dpo["device_margin_pct"] > plain["device_margin_pct"]
    assert "mistral by dpo: a row as two sequences" in dpo["evidence_detail"]
    for task in ("dpo", "kto"):
        with pytest.raises(EstimateError, match=f"--method full: {task} trains a LoRA"):
            estimate(MISTRAL, task=task, method="full")
    orpo, kto = (estimate(MISTRAL, task=task, precision="bf16") for task in ("orpo", "kto"))
    assert orpo["peak_allocated_bytes"] == dpo["peak_allocated_bytes"] > kto["peak_allocated_bytes"]
    assert kto["peak_allocated_bytes"] == plain["peak_allocated_bytes"]
    assert "mistral by kto: as causal_lm, by formula" in kto["evidence_detail"]
    assert orpo["device_margin_pct"] == kto["device_margin_pct"] == dpo["device_margin_pct"]


def test_a_failing_tracer_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EstimateError, match="--exact: the tracer failed"):
        estimate(config=TINY, seq=128, exact=True)

    def late(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("x", 1)

    monkeypatch.setattr(subprocess, "run", late)
    with pytest.raises(EstimateError, match="longer than"):
        estimate(config=TINY, seq=128, exact=True)


def test_the_default_estimate_is_the_trainers_own_step() -> None:
    """A change of the trainer's defaults must not go unnoticed here."""
    assert TrainConfig.model_fields["precision"].default == "auto"
    estimate = broker.estimate(MISTRAL)
    assert estimate["peak_allocated_bytes"] > 14 * GIB


@pytest.mark.parametrize("positions", ["4096", -1, 0, 2048.0])
def test_non_numeric_positions_are_reported(positions: object) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 1000, "max_position_embeddings": positions,
    }  # fmt: skip
    with pytest.raises(EstimateError, match="no positive max_position_embeddings"):
        estimate(config=config, seq=99)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_decoder_with_classes_makes_no_vocabularys_logits(method: str, accumulate: bool) -> None:
    model, asked = "HuggingFaceTB/SmolLM2-135M", {"method": method, "accumulate": accumulate, "seq": 512}
    words = estimate(model, micro_batch=8, **asked)["by_category"]
    for task in ("text_classification", "token_classification"):
        estimated = estimate(model, task=task, micro_batch=8, **asked)
        assert estimated["by_category"]["logits"] < words["logits"] / 10
        assert not estimated["notes"]
    number = estimate(model, task="reward_model", micro_batch=4, **asked)
    assert (
        number["peak_allocated_bytes"]
        <= estimate(model, task="text_classification", micro_batch=8, **asked)["peak_allocated_bytes"]
    )


@pytest.mark.parametrize("config", [TINY | {"model_type": ["llama"]}, {"text_config": TINY | {"model_type": {}}}])
def test_a_model_type_that_is_no_text_is_refused_in_one_line(config: dict[str, Any]) -> None:
    with pytest.raises(EstimateError, match="which is not a word"):
        estimate(config=config)


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("Llama-3.1-8B", "did you mean meta-llama/Llama-3.1-8B? Otherwise give --config"),
        ("unsloth/llama-3.1-8b", "did you mean meta-llama/Llama-3.1-8B?"),
        ("Mistral-7B", "did you mean mistralai/Mistral-7B-"),
        ("meta-llama/Llama-3.1-8", "did you mean meta-llama/Llama-3.1-8B"),
        ("no/such-thing-at-all", "not a folder; give --config CONFIG.json"),
    ],
)
def test_an_unknown_model_is_answered_with_names_of_the_catalogue(name: str, suggested: str) -> None:
    with pytest.raises(EstimateError, match=re.escape(suggested)):
        estimate(name)


def test_what_does_not_fit_names_fsdp_and_the_gpus_that_would_do() -> None:
    words = (MISTRAL, "--method", "full", "--gpu", "A100-80GB")
    ran = run(*words, "--gpus", "8")
    assert "does not fit" in ran.stdout
    assert "tokens/s" not in ran.stdout
    (hint,) = (line for line in ran.stdout.splitlines() if line.startswith("would fit: "))
    options = hint.removeprefix("would fit: ").partition(" (")[0].split()
    assert options[:4] == ["--gpus", "8", "--sharding", "fsdp"]
    assert "a100-80gb-sxm: fits" in run(*words, *options).stdout
    smaller = estimate(MISTRAL, method="full", gpu="A100-80GB")
    assert smaller["would_fit"]["gpus"] < 8
    assert (smaller.fits, smaller.tokens_per_s) == (False, None)


def test_recomputation_is_proposed_before_more_gpus() -> None:
    estimated = estimate(MISTRAL, gpu="A100-80GB", seq=8192, micro_batch=4)
    assert estimated["would_fit"] | {"device_used_bytes": 0} == {
        "gpus": 1, "nodes": 1, "sharding": "none", "gradient_checkpointing": True, "device_used_bytes": 0,
    }  # fmt: skip
    assert "would fit: --gradient-checkpointing (" in str(estimated)


def test_where_nothing_would_fit_other_ways_are_named() -> None:
    estimated = estimate("meta-llama/Llama-3.1-405B", method="qlora", gpu="L40S")
    assert estimated["would_fit"] is None
    assert "would fit: nothing found up to 64 GPUs" in str(estimated)


def test_the_result_prints_with_units_and_stays_a_document() -> None:
    estimated = estimate(MISTRAL, gpu="A100-80GB")
    assert json.loads(json.dumps(estimated)) == dict(estimated)
    assert estimated.peak_gib == pytest.approx(estimated["peak_allocated_bytes"] / GIB)
    assert estimated.device_gib == pytest.approx(estimated["device_used_bytes"] / GIB)
    assert (estimated.fits, estimated.tokens_per_s) == (True, estimated["tokens_per_s"])
    text = repr(estimated)
    assert text == str(estimated)
    assert re.search(rf"^in nvidia-smi +{estimated.device_gib:.2f} GiB$", text, re.MULTILINE)
    assert text.splitlines() == run(MISTRAL, "--gpu", "A100-80GB").stdout.splitlines()

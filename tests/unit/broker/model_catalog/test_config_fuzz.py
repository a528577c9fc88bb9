"""Any config.json makes `gpubroker estimate` give an answer or one line: no traceback, no half answer."""

import contextlib
import json
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from broker.cli.main import app
from broker.domain.errors import InvalidInput, Problem
from broker.model_catalog import catalog as catalogue
from broker.model_catalog import parameter_count
from broker.model_catalog.task_shape import HEADS, task_shape

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 1000, "num_hidden_layers": 5, "max_position_embeddings": 512,
}  # fmt: skip
ROBERTA: dict[str, Any] = {"model_type": "roberta", "vocab_size": 1000, "max_position_embeddings": 514}
KNOWN = (
    "meta-llama/Llama-3.1-8B", "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen2.5-7B", "google/gemma-3-1b-pt",
    "google/gemma-3-4b-pt", "openai-community/gpt2", "tiiuae/falcon-7b", "microsoft/phi-2", "google-t5/t5-small",
    "facebook/bart-base", "google-bert/bert-base-uncased", "distilbert/distilbert-base-uncased",
    "google/vit-base-patch16-224", "openai/whisper-tiny", "stable-diffusion-v1-5/stable-diffusion-v1-5",
)  # fmt: skip
PUBLISHED = [LLAMA, ROBERTA, *(dict(found.config) for name in KNOWN if (found := catalogue.find(name)) is not None)]
OTHERS = (
    "rope_scaling", "rope_parameters", "sliding_window", "layer_types", "id2label", "num_labels", "text_config",
    "quantization_config", "head_dim", "hidden_act", "attention_dropout", "num_experts", "architectures",
    "is_encoder_decoder", "max_window_layers", "max_target_positions", "sample_size", "tie_word_embeddings",
    "pad_token_id",
)  # fmt: skip
ODD = st.one_of(
    st.none(), st.booleans(), st.sampled_from(["", "8", "abc", "a\nb", "\ud800", "x" * 3000]),
    st.sampled_from([0, -1, 1, 2, 7, 10**30, 10**400, 0.5, -0.5, 1e308, float("inf"), float("nan")]),
    st.recursive(
        st.one_of(st.none(), st.integers(-1, 9), st.text(max_size=3)),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "type", "0"]), inner),
        max_leaves=5,
    ),
)  # fmt: skip
FIELDS = sorted({field for config in PUBLISHED for field in config} | set(OTHERS))


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Return a published config with up to three fields of any value."""
    config = dict(draw(st.sampled_from(PUBLISHED)))
    for field in draw(st.lists(st.sampled_from(FIELDS), max_size=3)):
        config[field] = draw(ODD)
    return config


def test_the_drawn_configs_are_of_all_these_models() -> None:
    assert len(PUBLISHED) == 2 + len(KNOWN)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(configs(), st.sampled_from([None, *HEADS, "seq2seq", "text_to_image"]), st.sampled_from(["lora", "full"]))
@example(LLAMA | {"hidden_act": []}, None, "lora")
@example(LLAMA | {"attention_dropout": 10**400}, None, "lora")
@example(LLAMA | {"model_type": "a\nb"}, None, "full")
@example(LLAMA | {"num_labels": {"a": 1}}, "text_classification", "lora")
@example(
    LLAMA | {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": None},
    None, "lora",
)  # fmt: skip
@example(ROBERTA | {"pad_token_id": [1]}, "text_classification", "lora")
@example(ROBERTA | {"pad_token_id": float("inf")}, "text_classification", "lora")
@example({"model_type": "whisper"}, None, "full")
@example({"model_type": "whisper", "max_target_positions": [1]}, None, "lora")
@example({"_class_name": "UNet2DConditionModel", "sample_size": "64"}, None, "lora")
@example({"model_type": "t5", "d_model": 10**400}, None, "lora")
@example({"model_type": "bart", "decoder_layers": 10**30}, None, "lora")
def test_any_config_gets_an_answer_or_one_line(config: dict[str, Any], task: str | None, method: str) -> None:
    words = ["estimate", "--config", json.dumps(config), "--seq", "16", "--method", method, "--json"]
    ran = CliRunner().invoke(app, [*words, *(["--task", task] if task else [])])
    assert ran.exit_code in (0, 2), (ran.exception, config)
    json.dumps(json.loads(ran.stdout), allow_nan=False)
    if ran.exit_code:
        assert len(ran.stderr.splitlines()) == 1, config
        assert 0 < len(ran.stderr) < 1000, config


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(configs(), st.sampled_from([*HEADS, "seq2seq", "text_to_image"]))
@example(LLAMA | {"model_type": "a\nb"}, "causal_lm")
@example(LLAMA | {"model_type": [], "text_config": LLAMA}, "text_classification")
@example(ROBERTA | {"pad_token_id": [1]}, "token_classification")
@example(ROBERTA | {"pad_token_id": "1" * 5000}, "text_classification")
def test_a_jobs_model_is_refused_in_one_line_too(config: dict[str, Any], task: str) -> None:
    """The daemon reads the same configs, and answers InvalidInput for what is at fault."""
    problems: tuple[Problem, ...] = ()
    try:
        task_shape("m", config, task)
    except InvalidInput as e:
        problems = tuple(e.problems)
    assert all("\n" not in problem.message and len(problem.message) < 1000 for problem in problems)
    with contextlib.suppress(ValueError):  # what a quote makes of a model that it does not estimate
        parameter_count.positions(config)

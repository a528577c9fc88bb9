"""A config without --task is estimated with the head of the class that it names."""

from typing import Any

import pytest

from broker.estimator.memory.estimate import EstimateOptions
from broker.sizing.estimate import estimate
from broker.sizing.what_if import what_if

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 1000, "num_hidden_layers": 5, "max_position_embeddings": 512,
}  # fmt: skip
BERT: dict[str, Any] = {"model_type": "bert", "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("config", "built", "task"),
    [
        (LLAMA, "LlamaForSequenceClassification", "text_classification"),
        (LLAMA, "LlamaForTokenClassification", "token_classification"),
        (BERT, "BertForSequenceClassification", "text_classification"),
        (BERT, "BertForTokenClassification", "token_classification"),
        ({"model_type": "vit", "image_size": 32}, "ViTForImageClassification", "image_classification"),
    ],
)
def test_the_class_of_a_config_says_its_task(config: dict[str, Any], built: str, task: str) -> None:
    given = config | {"architectures": [built], "num_labels": 7}
    estimated = estimate(config=given, seq=64)
    asked = estimate(config=given, seq=64, task=task)
    assert f"task {task}, by the config's architectures" in estimated["notes"]
    assert {**estimated, "notes": []} == {**asked, "notes": []}
    more = estimate(config=given | {"num_labels": 1007}, seq=64)
    assert more["trainable_parameters"] - estimated["trainable_parameters"] >= 1000


@pytest.mark.parametrize(
    "built",
    [
        None,
        [],
        [None],
        "LlamaForSequenceClassification",
        ["LlamaForCausalLM"],
        ["LlamaModel"],
        ["ViTForImageClassification"],
    ],
)
def test_any_other_class_is_a_decoder_as_before(built: object) -> None:
    estimated = estimate(config=LLAMA | {"architectures": built}, seq=64)
    assert {**estimated, "notes": []} == {**estimate(config=LLAMA, seq=64), "notes": []}


def test_a_scaling_table_has_the_same_head() -> None:
    given = LLAMA | {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}
    need = [
        what_if("gpus=1", config=config, gpu="l40s", ask=EstimateOptions(length=64))["points"][0]["need_bytes"]
        for config in (LLAMA, given)
    ]
    assert need[1] < need[0]


def test_an_encoder_decoder_stays_one_that_writes() -> None:
    small = {"model_type": "t5", "is_encoder_decoder": True, "num_layers": 2}
    estimated = estimate(config=small | {"architectures": ["T5ForSequenceClassification"]}, seq=64)
    assert estimated["parameters"] == estimate(config=small, seq=64)["parameters"]

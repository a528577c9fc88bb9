"""Encoders: kinds with the code of another kind are estimated as that kind; others are not treated as decoders."""

from typing import Any

import pytest

from broker.model_catalog.config_defaults import SAME_CODE
from broker.model_catalog.encoder_shape import ENCODERS
from broker.model_catalog.task_shape import task_shape
from broker.model_catalog.uncounted import PARTS
from broker.sizing.estimate import EstimateError, estimate
from trainer.contract.architectures import BIDIRECTIONAL

BASE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 5, "num_attention_heads": 8, "vocab_size": 1000,
    "max_position_embeddings": 514, "type_vocab_size": 1, "num_labels": 3,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "as_one"), SAME_CODE.items())
@pytest.mark.parametrize("task", [None, "text_classification", "token_classification"])
def test_a_kind_of_the_same_code_is_estimated_as_that(kind: str, as_one: str, task: str | None) -> None:
    found, same = (estimate(config={"model_type": k, **BASE}, seq=512, task=task) for k in (kind, as_one))
    assert found["notes"] == [f"{kind} is estimated as {as_one}, whose code it shares", *same["notes"]]
    assert {**found, "notes": []} == {**same, "notes": []}


@pytest.mark.parametrize("name", ["XLMRobertaForTokenClassification", "CamembertForSequenceClassification"])
def test_the_class_of_a_kind_gives_its_task(name: str) -> None:
    kind = "camembert" if name.startswith("Camem") else "xlm-roberta"
    task = "token_classification" if "Token" in name else "text_classification"
    estimated = estimate(config={"model_type": kind, "architectures": [name], **BASE}, seq=512)
    assert f"task {task}, by the config's architectures" in estimated["notes"]
    assert task_shape(kind, {"model_type": kind, **BASE}, task) is not None, "a job of it has a quote with hours"


@pytest.mark.parametrize("kind", sorted(SAME_CODE))
def test_the_counts_are_those_of_its_classes(kind: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForSequenceClassification.from_config(
            transformers.AutoConfig.for_model(kind, **BASE)
        )
    estimated = estimate(config={"model_type": kind, **BASE}, seq=512, method="full")
    assert estimated["parameters"] == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", sorted(BIDIRECTIONAL - ENCODERS - SAME_CODE.keys() - PARTS.keys()))
def test_no_other_encoder_is_taken_for_a_decoder(kind: str) -> None:
    with pytest.raises(
        EstimateError, match=rf"is an encoder \({kind}\) that is not supported; supported are bert, camembert"
    ):
        estimate(config={"model_type": kind, **BASE}, seq=512)


def test_an_encoder_that_is_built_as_a_decoder_is_not_counted() -> None:
    with pytest.raises(EstimateError, match="no memory model counts the layers of rembert; add --exact"):
        estimate(config={"model_type": "rembert", "is_decoder": True, **BASE}, seq=512)

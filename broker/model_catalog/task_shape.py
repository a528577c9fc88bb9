"""Shape of the model that a task trains: the task determines the fields that matter and the head."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from broker.domain.errors import InvalidInput, Problem
from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import FAMILIES
from broker.model_catalog.config_defaults import filled, kind_of
from broker.model_catalog.config_validation import EXPERTS, check_kind
from broker.model_catalog.decoder_shape import MIXTURES, headed_shape, shape_of, written_shape
from broker.model_catalog.encoder_shape import ENCODERS, labels_of
from broker.model_catalog.uncounted import uncounted
from trainer.contract.architectures import NEXT_TOKEN, is_mixture, model_misuse_message

Head = Literal["tokens", "text", "words", "image"]
HEADS: Mapping[str, Head] = {
    **dict.fromkeys(NEXT_TOKEN, "tokens"), "text_classification": "text", "text_regression": "text",
    "reward_model": "text", "token_classification": "words", "image_classification": "image",
}  # fmt: skip
"""Output of the task's model for its last hidden states. Tasks that are not listed are not estimated."""
_WITH_TEXTS = (ENCODERS | frozenset(FAMILIES)) - {"vit"}
NUMBERS = frozenset({"text_regression", "reward_model"})
"""Tasks whose head returns one number."""


BUILT_FOR = {
    "ForSequenceClassification": "text_classification", "ForTokenClassification": "token_classification",
    "ForImageClassification": "image_classification",
}  # fmt: skip
"""Tasks of classes with a head, by the end of the class name."""


def built_for(config: Mapping[str, Any]) -> str | None:
    """Return the task of the class that `architectures` names, if such a head is estimated for the family.

    Return None for any other class; the caller then chooses the most common task of the model type.
    """
    named = config.get("architectures")
    if not (isinstance(named, list) and named and isinstance(named[0], str)):
        return None
    task = next((task for end, task in BUILT_FOR.items() if named[0].endswith(end)), None)
    return task if kind_of(config) in ({"vit"} if task == "image_classification" else _WITH_TEXTS) else None


def task_shape(name: str, config: Mapping[str, Any], task: str) -> ModelShape | None:
    """Return the shape of the model that `task` trains, or None if such a model is not estimated.

    A model without a shape can still be trained. Raise InvalidInput for a broken config, and for a model that the task
    cannot train.
    """
    try:
        check_kind(_of_texts(config))
    except ValueError as e:
        raise _invalid(f"config.json of {name!r} has {e}") from None
    family = str(_of_texts(config).get("model_type") or "")
    if not family:
        raise _invalid(f"config.json of {name!r} has no model_type; is this a transformers model?")
    if wrong := model_misuse_message(task, {**config, "model_type": family}):
        raise _invalid(f"{name!r} {wrong}")
    if task == "seq2seq":
        return written_shape(name, config)
    head = HEADS.get(task)
    if head is None:
        return None
    if (head == "image") != (family == "vit") and family in {*ENCODERS, *FAMILIES}:
        expected = "a model of images, such as vit" if head == "image" else "a model of texts"
        raise _invalid(f"{name!r} is of the kind {family}; task {task} takes {expected}")
    if family in ENCODERS and head != "tokens":
        labels = {"num_labels": 1} if task in NUMBERS else {}
        return headed_shape(name, {**config, **labels}, "token_classification" if head == "words" else None)
    return _decoder(name, config, family, task, head)


def _decoder(name: str, config: Mapping[str, Any], family: str, task: str, head: Head) -> ModelShape | None:
    """Return the shape of a decoder with that head, or None if it is not estimated. Raise InvalidInput."""
    if uncounted(config) is not None:
        return None
    experts = is_mixture(config) or any(config.get(key) for key in EXPERTS)
    whole, config = config, _of_texts(config)
    if family in ENCODERS or (experts and family not in MIXTURES):
        return None
    if head == "tokens":
        return shape_of(name, whole, mixtures=True)
    if family not in FAMILIES:
        return None  # it may be an encoder or a decoder, of texts or of images
    shape = shape_of(name, whole, mixtures=True)
    labels = 1 if task in NUMBERS else _labels(name, config)
    spared = 0 if shape.tied_embeddings else shape.vocabulary * shape.hidden
    return replace(
        shape,
        head=head,
        labels=labels,
        head_parameters=labels * shape.hidden,
        tied_embeddings=True,
        parameters=shape.parameters - spared + labels * shape.hidden,
    )


def _of_texts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text part of a config, with its defaults."""
    text = config.get("text_config")
    return filled(text if isinstance(text, Mapping) and text else config)[0]


def _labels(name: str, config: Mapping[str, Any]) -> int:
    """Return the number of classes. Raise InvalidInput."""
    try:
        return labels_of(config)
    except ValueError as e:
        raise _invalid(f"config.json of {name!r} has {e}") from None


def _invalid(message: str) -> InvalidInput:
    return InvalidInput(Problem(field="train.model", message=message))

"""Which shape the model of a task has: the task decides what is read of a config, and what stands on top."""

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
from trainer.contract.architectures import misuse

Head = Literal["tokens", "text", "words", "image"]
HEADS: Mapping[str, Head] = {
    "causal_lm": "tokens", "dpo": "tokens", "text_classification": "text", "text_regression": "text",
    "reward_model": "text", "token_classification": "words", "image_classification": "image",
}  # fmt: skip
"""What the model of a task makes of its last hidden states. Tasks that are not here are not estimated."""
_WITH_TEXTS = (ENCODERS | frozenset(FAMILIES)) - {"vit"}
OTHER_WORDS = frozenset({
    "bloom", "codegen", "cpmant", "ctrl", "dbrx", "falcon_mamba", "gpt_neo", "gpt_neox_japanese", "gptj", "mamba",
    "mamba2", "mpt", "nemotron_h", "openai-gpt", "opt", "rwkv", "xglm", "xlstm", "zaya",
})  # fmt: skip
"""Decoders of transformers whose configs name their sizes by words of their own: trained, and estimated by nobody."""
NUMBERS = frozenset({"text_regression", "reward_model"})
"""Tasks whose head makes one number."""


BUILT_FOR = {
    "ForSequenceClassification": "text_classification", "ForTokenClassification": "token_classification",
    "ForImageClassification": "image_classification",
}  # fmt: skip
"""Ends of the names of classes that have a head, and their tasks."""


def built_for(config: Mapping[str, Any]) -> str | None:
    """The task of the class that `architectures` names, of the families that are estimated with such a head; None for
    any other, which is taken for what its kind is mostly trained for.
    """
    named = config.get("architectures")
    if not (isinstance(named, list) and named and isinstance(named[0], str)):
        return None
    task = next((task for end, task in BUILT_FOR.items() if named[0].endswith(end)), None)
    return task if kind_of(config) in ({"vit"} if task == "image_classification" else _WITH_TEXTS) else None


def task_shape(name: str, config: Mapping[str, Any], task: str) -> ModelShape | None:
    """The shape of the model that `task` trains; None where nobody estimates such a one, which is no reason not to
    train it. Raises InvalidInput for a config that is broken, and for a model that the task cannot train.
    """
    try:
        check_kind(_of_texts(config))
    except ValueError as e:
        raise _invalid(f"config.json of {name!r} has {e}") from None
    family = str(_of_texts(config).get("model_type") or "")
    if not family:
        raise _invalid(f"config.json of {name!r} has no model_type; is this a transformers model?")
    if wrong := misuse(task, {**config, "model_type": family}):
        raise _invalid(f"{name!r} {wrong}")
    if task == "seq2seq":
        return written_shape(name, config)
    head = HEADS.get(task)
    if head is None:
        return None
    if (head == "image") != (family == "vit") and family in {*ENCODERS, *FAMILIES}:
        wanted = "a model of images, such as vit" if head == "image" else "a model of texts"
        raise _invalid(f"{name!r} is of the kind {family}; task {task} takes {wanted}")
    if family in ENCODERS and head != "tokens":
        labels = {"num_labels": 1} if task in NUMBERS else {}
        return headed_shape(name, {**config, **labels}, "token_classification" if head == "words" else None)
    return _decoder(name, config, family, task, head)


def _decoder(name: str, config: Mapping[str, Any], family: str, task: str, head: Head) -> ModelShape | None:
    """Raises InvalidInput."""
    config = _of_texts(config)
    if head == "tokens" and family in OTHER_WORDS:
        return None
    if family in ENCODERS or (any(config.get(key) for key in EXPERTS) and family not in MIXTURES):
        return None
    if head == "tokens":
        return shape_of(name, config, mixtures=True)
    if family not in FAMILIES:
        return None  # it may be an encoder or a decoder, of texts or of images
    shape = shape_of(name, config, mixtures=True)
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
    """What a model of texts and images says of its texts."""
    text = config.get("text_config")
    return filled(text if isinstance(text, Mapping) and text else config)[0]


def _labels(name: str, config: Mapping[str, Any]) -> int:
    """Raises InvalidInput."""
    try:
        return labels_of(config)
    except ValueError as e:
        raise _invalid(f"config.json of {name!r} has {e}") from None


def _invalid(message: str) -> InvalidInput:
    return InvalidInput(Problem(field="train.model", message=message))

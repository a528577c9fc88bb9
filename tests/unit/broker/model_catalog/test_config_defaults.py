"""A config without a value gets the default of transformers' class: bare and whole configs have the same shape."""

from typing import Any

import pytest

from broker.model_catalog.config_defaults import DEFAULTS, SAME_CODE
from broker.model_catalog.decoder_shape import headed_shape, shape_of, written_shape
from broker.model_catalog.encoder_shape import ENCODERS
from broker.model_catalog.parameter_count import is_tied

POSITIONS = ("max_position_embeddings", "rope_scaling", "rope_parameters")
"""Keys of rotary models. A config without them gets no default, so that no length is refused."""


def _whole(family: str) -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    found: dict[str, Any] = transformers.AutoConfig.for_model(family).to_dict()
    return found


@pytest.mark.parametrize("family", sorted(DEFAULTS))
def test_a_bare_config_is_its_class_default(family: str) -> None:
    whole = _whole(family)
    bare = {"model_type": family, **{key: whole[key] for key in POSITIONS if key in whole}}
    if family == "t5":
        bare["is_encoder_decoder"] = True
    shapes = [
        headed_shape("x", config) or written_shape("x", config) or shape_of("x", config, mixtures=True)
        for config in (bare, whole)
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("family", sorted(set(DEFAULTS) - ENCODERS - SAME_CODE.keys()))
def test_embeddings_are_tied_as_in_the_models_class(family: str) -> None:
    assert is_tied({"model_type": family}) == _whole(family)["tie_word_embeddings"]

"""The bundled catalogue: what it promises to know, and counts that agree with the published ones."""

from typing import Any

import pytest

from broker.model_catalog import catalog as catalogue
from broker.model_catalog.parameter_count import parameters


def known(name: str) -> catalogue.Published:
    found = catalogue.find(name)
    assert found is not None, name
    return found


MODELS = [n for n in catalogue.names() if f"/{n}/" in known(n).source]
"""Names of the catalogue without the tuned siblings, which have their base's config."""


def _smallest(of_each: int) -> list[str]:
    """Return a few models of each class that transformers knows, the smallest, because large models build slowly."""
    by_class: dict[str, list[str]] = {}
    for name in sorted(MODELS, key=lambda n: known(n).parameters):
        for built_as in known(name).config.get("architectures", ()):
            by_class.setdefault(built_as, []).append(name)
    return [n for names in by_class.values() for n in names[:of_each]]


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_counted_as_published(name: str) -> None:
    assert parameters(known(name).config) == known(name).parameters


def _built(config: dict[str, Any]) -> int:
    """Return parameters of the real class on the meta device."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    found = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device("meta"):
        model = getattr(transformers, config["architectures"][0])(found)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", _smallest(2))
def test_parameters_are_counted_as_transformers_counts_them(name: str) -> None:
    config = dict(known(name).config)
    # transformers 5 ties FLAN-T5's output layer in memory; the checkpoint has it apart.
    apart = config["model_type"] == "t5" and config.get("tie_word_embeddings") is False
    output = config["vocab_size"] * config["d_model"] if apart else 0
    assert _built(config) + output == known(name).parameters


def test_the_catalogue_has_the_popular_families() -> None:
    families = {known(n).config.get("model_type", "unet") for n in catalogue.names()}
    assert families >= {
        *("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "falcon"),
        *("starcoder2", "gpt2", "gpt_neox", "gpt_bigcode", "t5", "bart", "bert", "roberta", "distilbert", "vit"),
        *("whisper", "unet"),
    }
    assert len(MODELS) >= 40


def test_every_entry_says_where_it_is_from() -> None:
    for name in MODELS:
        entry = known(name)
        assert entry.source.startswith(f"https://huggingface.co/{name}/blob/main/")
        assert entry.licence


def test_a_tuned_sibling_has_its_bases_config() -> None:
    assert catalogue.find("google/gemma-2-2b-it") == catalogue.find("google/gemma-2-2b")
    assert catalogue.find("google/gemma-2-2b-it ") is None


def test_a_sibling_may_differ_from_its_base() -> None:
    base, tuned = known("Qwen/Qwen2.5-7B"), known("Qwen/Qwen2.5-7B-Instruct")
    assert (base.config["max_position_embeddings"], tuned.config["max_position_embeddings"]) == (131072, 32768)
    assert tuned.parameters == base.parameters


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("google-t5/t5-small", {"d_ff": 0}, "no positive d_ff"),
        ("openai/whisper-tiny", {"d_model": "wide"}, "no positive d_model"),
        ("google/gemma-3-4b-pt", {"vision_config": None}, "no text_config with a vision_config"),
        ("stabilityai/stable-diffusion-xl-base-1.0", {"block_out_channels": None}, "no usable"),
    ],
)
def test_a_config_that_cannot_be_counted_is_named(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parameters({**known(name).config, **changes})

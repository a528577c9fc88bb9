"""Twenty architectures: each has a number that counts all of its parts, or one line that names the missing part."""

from typing import Any

import pytest

from broker.model_catalog.task_shape import task_shape
from broker.model_catalog.uncounted import OTHERS, PARTS, uncounted
from broker.sizing.estimate import EstimateError, estimate

LLAMA: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": 1000, "num_hidden_layers": 5, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "attention_dropout": 0.0, "attention_bias": False,
}  # fmt: skip
VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "image_size": 32, "patch_size": 16}
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3", "text_config": LLAMA | {"model_type": "gemma3_text"},
    "vision_config": VISION | {"model_type": "siglip_vision_model", "num_attention_heads": 4},
}  # fmt: skip
NUMBERS = {
    "mixtral": "AutoModelForCausalLM", "qwen3_moe": "AutoModelForCausalLM", "whisper": "AutoModelForSpeechSeq2Seq",
    "gemma3": "AutoModelForCausalLM", "olmo2": "AutoModelForCausalLM", "cohere2": "AutoModelForCausalLM",
}  # fmt: skip
REFUSED = {
    "gpt_oss": "attention sinks", "llama4": "shared experts", "deepseek_v3": "latent attention",
    "granitemoe": "routed experts", "granitemoehybrid": "Mamba layers", "jamba": "Mamba layers",
    "mamba2": "Mamba 2 blocks", "falcon_h1": "Mamba blocks", "gemma3n": "vision and audio towers",
    "qwen3_next": "linear attention",
    "qwen2_5_vl": "vision_config", "llava": "vision_config", "phi4_multimodal": "vision and audio towers",
    "modernbert": "alternating windows",
}  # fmt: skip
TRACED = {"mamba2", "falcon_h1", "modernbert"}


def published(kind: str) -> dict[str, Any]:
    """Return config.json with the values of transformers' config class."""
    auto = pytest.importorskip("transformers").AutoConfig
    config: dict[str, Any] = auto.for_model(kind).to_dict()
    return config | {"model_type": kind}


def refusal(config: dict[str, Any], method: str = "lora") -> str:
    with pytest.raises(EstimateError) as refused:
        estimate(config=config, method=method)
    return str(refused.value)


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_number_counts_every_parameter_of_the_class(kind: str) -> None:
    config = published(kind)
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    with torch.device("meta"):
        model = getattr(transformers, NUMBERS[kind]).from_config(transformers.AutoConfig.for_model(kind))
    for method in ("lora", "full"):
        estimated = estimate(config=config, method=method)
        assert estimated["parameters"] == sum(p.numel() for p in model.parameters())
        assert estimated["margin_pct"] <= 20


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_names_the_missing_part_and_what_to_do(kind: str, method: str) -> None:
    line = refusal(published(kind), method)
    assert REFUSED[kind] in line
    assert line.startswith("'config' is not estimated: no memory model counts ")
    assert ("; add --exact" in line) == (kind in TRACED)
    assert ("; for the language model alone give its text_config" in line) == (kind in ("llava", "qwen2_5_vl"))
    assert "first step measures it" in line or "text_config" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("FluxTransformer2DModel", "FLUX"),
        ("FluxPipeline", "FLUX"),
        ("SD3Transformer2DModel", "Stable Diffusion 3"),
        ("StableDiffusion3Pipeline", "Stable Diffusion 3"),
    ],
)
def test_diffusion_transformers_name_the_estimated_unets(name: str, words: str) -> None:
    line = refusal({"_class_name": name, "num_layers": 19, "num_attention_heads": 24})
    assert f"counts the diffusion transformer of {words}; UNets of Stable Diffusion 1.5 and XL are estimated" in line


@pytest.mark.parametrize(
    ("more", "fields"),
    [
        ({"ssm_state_size": 16}, "ssm_state_size of own adds"),
        ({"n_shared": 1, "latent": [1], "ratio": 0.5, "z": 1}, "n_shared, latent, ratio of own add;"),
        ({"layer_types": ["full_attention", "conv"]}, "layer_types of own adds"),
        ({"hidden_act": "relu2"}, "hidden_act of own adds"),
        ({"attention_bias": True}, "attention_bias of own adds"),
        ({"num_experts": 8}, "the experts of own"),
        ({"model_type": "apertus"}, "the layers of apertus"),
    ],
)
def test_an_unknown_kind_is_refused_for_a_field_that_a_llama_lacks(more: dict[str, Any], fields: str) -> None:
    assert fields in refusal({"model_type": "own", **LLAMA, **more})


def test_an_unknown_kind_with_a_llamas_fields_is_counted_as_one() -> None:
    config = LLAMA | {"model_type": "own", "layer_types": ["full_attention"] * 5, "hidden_act": "silu"}
    estimated = estimate(config=config, seq=512)
    assert (estimated["evidence"], estimated["margin_pct"]) == ("unchecked", 140.0)
    assert estimated["parameters"] == estimate(config=LLAMA | {"model_type": "llama"}, seq=512)["parameters"]


@pytest.mark.parametrize("kind", ["falcon_h1", "llava", "gpt_oss", "opt"])
def test_a_job_of_an_uncounted_model_is_quoted_without_hours(kind: str) -> None:
    assert task_shape("m", published(kind), "causal_lm") is None


def test_another_encoders_refusal_lists_the_supported_ones() -> None:
    assert "that is not supported; supported are bert" in refusal({"model_type": "electra", **LLAMA})


def test_no_estimated_family_is_listed_as_uncounted() -> None:
    for kind in PARTS.keys() | OTHERS:
        gap = uncounted({"model_type": kind, **LLAMA})
        assert gap is not None, kind
        assert gap.traceable == (gap.instead.startswith("add --exact"))
    assert uncounted({"model_type": "bart", "is_encoder_decoder": True}) is None
    assert "for the text of it" not in refusal(
        {"model_type": "m", "text_config": {"model_type": "own", **LLAMA}, "a_config": VISION}
    )


def test_a_tower_is_held_in_memory_and_not_trained() -> None:
    text: dict[str, Any] = {"seq": 128, "config": GEMMA3["text_config"]}
    whole: dict[str, Any] = {"seq": 128, "config": GEMMA3}
    for method, width in (("full", 4), ("lora", 2), ("qlora", 2)):
        alone, found = estimate(**text, method=method), estimate(**whole, method=method)
        more = found["parameters"] - alone["parameters"]
        held = found["by_category"]["weights"] - alone["by_category"]["weights"]
        assert found["trainable_parameters"] == alone["trainable_parameters"]
        sides = 2 * (4 * 2 * 64 + 2 * (64 + 128))
        quantised = 2 * (4 * 64 * 64 + 2 * 64 * 128) if method == "qlora" else 0
        adapters = 0 if method == "full" else 4 * 16 * sides
        low = adapters + (more - quantised) * width + quantised // 2
        assert low <= held <= low + quantised // 32
        assert "gemma3: rows of text; its vision tower is held in memory and not trained" in found["notes"]
    shared = [estimate(**c, method="full", gpus=2, sharding="fsdp")["peak_allocated_bytes"] for c in (text, whole)]
    assert shared[1] - shared[0] >= 2 * more, "the gathered root holds the tower"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GEMMA3 | {"vision_config": {"depth": 3}}, "no positive hidden_size"),
        (GEMMA3 | {"vision_config": 3}, "no text_config with a vision_config"),
    ],
)
def test_a_broken_tower_is_named(config: dict[str, Any], words: str) -> None:
    assert words in refusal(config)

"""Parts of a model that no memory model counts. A model with such a part is refused, never estimated without it.

A known family is counted as a whole. Any other model is counted as a llama if every field of its config is a size of a
llama, or adds no parameters.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from broker.domain.workload import Tower
from broker.estimator.architecture.families import FAMILIES, PAIRS
from broker.model_catalog.config_defaults import kind_of
from broker.model_catalog.config_validation import EXPERTS
from broker.model_catalog.encoder_shape import ENCODERS
from broker.model_catalog.parameter_count import number, siglip_tower
from trainer.contract.architectures import BIDIRECTIONAL

Config = Mapping[str, Any]
PARTS = {
    "deepseek_v2": "latent attention, routed and shared experts",
    "deepseek_v3": "latent attention, routed and shared experts, dense first layers",
    "falcon_h1": "Mamba blocks next to the attention of every layer",
    "gemma3n": "embeddings for each layer, AltUp and LAuReL blocks, vision and audio towers",
    "gemma3n_text": "embeddings for each layer, AltUp and LAuReL blocks",
    "gpt_oss": "attention sinks and experts with biases",
    "granitemoe": "its routed experts",
    "granitemoehybrid": "Mamba layers, routed and shared experts",
    "jamba": "Mamba layers and layers of experts",
    "llama4": "layers of routed and shared experts, a vision tower",
    "llama4_text": "layers of routed and shared experts",
    "mamba": "Mamba blocks",
    "mamba2": "Mamba 2 blocks",
    "modernbert": "alternating windows and the gated MLP of this encoder",
    "phi4_multimodal": "vision and audio towers, and the adapters for them",
    "phi4mm": "vision and audio towers, and the adapters for them",
    "qwen3_next": "linear attention, routed and shared experts",
}
"""Uncounted parts by model type."""
OTHERS = frozenset({
    "afmoe", "apertus", "apertus1p5_text", "arcee", "aria_text", "axk1", "axk2", "bailing_hybrid", "bamba", "beam",
    "biogpt", "bloom", "blt", "codegen", "cohere2_moe", "cohere_compass_text", "cpmant", "ctrl", "dbrx",
    "deepseek_v32", "deepseek_v4", "doge", "dory", "dots1", "dots3_note", "dots3_note_text", "emu3", "ernie4_5_moe",
    "exaone_moe", "falcon_mamba", "flex_olmo", "flint", "fuyu", "gemma4", "gemma4_assistant", "gemma4_text",
    "gemma4_unified", "gemma4_unified_assistant", "gemma4_unified_text", "git", "glm4_moe", "glm4_moe_lite",
    "glm_moe_dsa", "got_ocr2", "gpt_neo", "gpt_neox_japanese", "gptj", "granitemoe_swa",
    "granitemoeshared", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hy_v4", "inkling2_loop_text",
    "inkling2_text", "inkling_text", "jais2", "jetmoe", "kimi_linear", "kolibri1", "laguna", "lara_mini", "lfm2",
    "lfm2_moe", "lfm3", "longcat_flash", "mellum", "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2",
    "minimax_m3_vl_text", "ministral", "mllama", "modernbert-decoder", "moshi", "moss_transcribe_diarize", "mpt",
    "nanochat", "nemotron", "nemotron_h", "olmo_hybrid", "olmoe", "openai-gpt", "opt", "persimmon", "phimoe",
    "qwen2_moe", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen4_exp", "qwen4_exp_text",
    "recurrent_gemma", "rwkv", "sarvam_mla", "sarvam_moe", "solar_open", "xglm", "xlstm", "youtu", "zamba", "zamba2",
    "zaya"
})  # fmt: skip
"""Other decoders of transformers whose classes have parts, or names of sizes, that a llama lacks."""
MIXED = frozenset({
    "deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe", "granitemoehybrid", "jamba", "llama4", "llama4_text",
    "qwen3_next",
})  # fmt: skip
"""Mixtures of experts, which the tracer refuses too, because the data decides which expert computes what."""
UNTRACEABLE = frozenset({"gemma3n", "phi4_multimodal", "phi4mm"})
"""Models that need packages or code that the trainer lacks."""
LANGUAGE_MODELS = {"qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2"}
"""Counted families with the same layers as the text part of a vision-language model."""
SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size")
"""Fields that a config must have to be counted as a llama."""
WITHOUT_PARAMETERS = frozenset({
    "_attn_implementation", "_name_or_path", "architectures", "auto_map", "bos_token", "chunk_size_feed_forward",
    "dtype", "eos_token", "head_dim", "hidden_act", "hidden_activation", "id2label", "initializer_range",
    "is_decoder", "label2id", "layer_types", "logit_scale", "max_position_embeddings", "max_window_layers",
    "model_type", "name_or_path", "num_key_value_heads", "num_labels", "partial_rotary_factor", "pretraining_tp",
    "problem_type", "quantization_config", "return_dict", "rope_parameters", "rope_scaling", "rope_theta",
    "rotary_pct", "sliding_window", "sliding_window_pattern", "tie_word_embeddings", "tokenizer_class", "torch_dtype",
    "transformers_version", "use_cache", "use_sliding_window",
})  # fmt: skip
"""Other fields that `parameter_count` reads, or that add no parameters."""
ENDINGS = ("_token_id", "_eps", "_epsilon", "dropout", "pdrop", "_softcapping")
"""Ends of fields that add no parameters."""
GATED = frozenset({"silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"})
"""Activations of gated MLPs. Others usually stand in an MLP of two matrices."""
ATTENTIONS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
DIFFUSION = {
    "FluxTransformer2DModel": "FLUX", "FluxPipeline": "FLUX", "SD3Transformer2DModel": "Stable Diffusion 3",
    "StableDiffusion3Pipeline": "Stable Diffusion 3",
}  # fmt: skip
MEASURE = "a job of it is quoted by price, and its first step measures it"
TRACE = f"add --exact, which traces the model's own code; without it {MEASURE}"


@dataclass(frozen=True, kw_only=True)
class Uncounted:
    """Why a model is not estimated, and what its user can do instead."""

    parts: str
    instead: str = MEASURE
    traceable: bool = False
    """The exact tracer can run the model's own code."""

    def message(self, name: str) -> str:
        """Return the refusal in one line."""
        return f"{name!r} is not estimated: no memory model counts {self.parts}; {self.instead}"


def text_of(config: Config) -> Config:
    """Return the language model's part of a config that also describes other parts."""
    text = config.get("text_config")
    if not isinstance(text, Mapping) or not text:
        return config
    whole = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
    return {**whole, **text}


def tower_of(config: Config) -> Tower | None:
    """Return the counted vision part of a config; None if there is none. Raise ValueError for a broken one."""
    vision, text = config.get("vision_config"), config.get("text_config")
    if config.get("model_type") != "gemma3" or not vision or not text:
        return None
    if not isinstance(vision, Mapping) or not isinstance(text, Mapping):
        raise ValueError("no text_config with a vision_config")
    return siglip_tower(vision, number(text, "hidden_size"))


def uncounted(config: Config) -> Uncounted | None:
    """Return why the model is not estimated; None if all of its parts are counted, or if the config is broken."""
    if (name := DIFFUSION.get(str(config.get("_class_name")))) is not None:
        return Uncounted(
            parts=f"the diffusion transformer of {name}",
            instead="UNets of Stable Diffusion 1.5 and XL are estimated, and the trainer's text_to_image takes these",
        )
    whole, text = kind_of(config), text_of(config)
    kind = kind_of(text)
    for model_type in (whole, kind):
        if model_type in PARTS:
            return _named(model_type, PARTS[model_type])
    if towers := [] if whole == "gemma3" else list(_towers(config)):
        return Uncounted(
            parts=f"the parts of {whole or 'the model'} in {' and '.join(towers)}", instead=_text_alone(kind)
        )
    if not kind or kind in FAMILIES or kind in PAIRS or kind in ENCODERS or text.get("is_encoder_decoder"):
        return None
    if kind in BIDIRECTIONAL and not text.get("is_decoder"):
        return None
    if kind in OTHERS or kind in BIDIRECTIONAL:
        return _named(kind, f"the layers of {kind}")
    if any(text.get(key) for key in EXPERTS):
        return Uncounted(parts=f"the experts of {kind}")
    fields = list(_unknown_fields(text)) if all(text.get(key) is not None for key in SIZES) else []
    return _named(kind, f"what {', '.join(fields[:3])} of {kind} add{'s' * (len(fields) == 1)}") if fields else None


def _named(kind: str, parts: str) -> Uncounted:
    traceable = kind not in MIXED and kind not in UNTRACEABLE and not kind.endswith("moe")
    return Uncounted(parts=parts, instead=TRACE if traceable else MEASURE, traceable=traceable)


def _towers(config: Config) -> Iterator[str]:
    """Yield the fields that describe parts other than the language model."""
    for key, value in config.items():
        if key.endswith("_config") and isinstance(value, Mapping) and value and key not in (
            "text_config", "quantization_config", "generation_config"
        ):  # fmt: skip
            yield key


def _text_alone(kind: str) -> str:
    """Return how to estimate the language model alone, if its family is counted."""
    if kind in FAMILIES:
        return "for the language model alone give its text_config as --config"
    if kind in LANGUAGE_MODELS:
        like = LANGUAGE_MODELS[kind]
        return f'for the language model alone give its text_config as --config, with "model_type": "{like}"'
    return MEASURE


def _unknown_fields(text: Config) -> Iterator[str]:
    """Yield the fields of an unknown architecture that may add parameters which a llama lacks."""
    for key, value in text.items():
        if key in SIZES or value in (None, False, 0, "", [], {}) or key.endswith(ENDINGS):
            continue
        kinds = {str(kind) for kind in value} - ATTENTIONS if key == "layer_types" and isinstance(value, list) else ()
        odd = key in ("hidden_act", "hidden_activation") and value not in GATED
        if key not in WITHOUT_PARAMETERS or kinds or odd:
            yield key

"""Shape of a model from its transformers config."""

from collections.abc import Mapping, Sequence
from typing import Any

from broker.domain.errors import InvalidInput, Problem
from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import FAMILIES, PAIRS
from broker.model_catalog import parameter_count
from broker.model_catalog.config_defaults import SAME_CODE, filled
from broker.model_catalog.config_validation import ACTIVATION_KEYS, EXPERTS, check
from broker.model_catalog.encoder_shape import ENCODERS, encoder_shape
from broker.model_catalog.seq2seq_shape import pair_shape
from broker.model_catalog.uncounted import text_of, tower_of, uncounted
from trainer.contract.architectures import BIDIRECTIONAL, QUANTISED, is_mixture, is_quantised, model_misuse_message

PLAIN_MLP = frozenset({"gpt2", "gpt_bigcode", "gpt_neox", "falcon", "phi", "starcoder2"})
"""Families whose MLP has two matrices."""


def _invalid(message: str) -> InvalidInput:
    return InvalidInput(Problem(field="train.model", message=message))


WINDOWED = frozenset({"mistral", "gemma2", "gemma3_text", "cohere2"})
"""Families whose class has a sliding window of 4096 tokens by default."""
CAPPED = {"gemma2": 30.0, "gemma3_text": None}
"""Families that may cap logits, and the default cap of their class."""
MIXTURES = frozenset({"mixtral", "qwen3_moe"})


def headed_shape(name: str, config: Mapping[str, Any], task: str | None = None) -> ModelShape | None:
    """Return the shape of an encoder with the task's head; None if the model is not a supported encoder.

    `task` None: the head classifies whole texts or images. Raise InvalidInput.
    """
    config, _ = filled(config)
    if config.get("model_type") not in ENCODERS:
        return None
    try:
        check(config)
        return encoder_shape(name, config, task or "text_classification")
    except ValueError as e:
        raise _invalid(f"config.json of {name!r} has {e}") from None


def written_shape(name: str, config: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape of a supported encoder-decoder; None for any other model. Raise InvalidInput."""
    config, _ = filled(config)
    if config.get("model_type") not in PAIRS:
        return None
    try:
        check(config)
        return pair_shape(name, config)
    except ValueError as e:
        raise _invalid(f"config.json of {name!r} has {e}") from None


def _plain(name: str, family: str, config: Mapping[str, Any], *, mixtures: bool) -> None:
    """Raise InvalidInput for a model that is not estimated."""
    if config.get("is_encoder_decoder"):
        raise _invalid(
            f"{name!r} is an encoder-decoder, which is not estimated; causal_lm takes a decoder, seq2seq takes this one"
        )
    if not mixtures and (is_mixture(config) or any(config.get(key) for key in EXPERTS)):
        raise _invalid(f"{name!r} is a mixture of experts, which cannot be estimated yet; choose a dense model")
    if config.get("quantization_config"):
        raise _invalid(f"{name!r} {QUANTISED}")
    if family in ENCODERS:
        raise _invalid(f"{name!r} is an encoder ({family}); causal_lm takes a decoder")
    if family in BIDIRECTIONAL and model_misuse_message("causal_lm", config):
        supported = ", ".join(sorted(ENCODERS | SAME_CODE.keys()))
        raise _invalid(f"{name!r} is an encoder ({family}) that is not supported; supported are {supported}")


def _counted(name: str, config: Mapping[str, Any]) -> None:
    """Raise InvalidInput for a model with a part that is not counted."""
    if (gap := uncounted(config)) is not None:
        raise _invalid(f"{name!r} {QUANTISED}" if is_quantised(config) else gap.message(name))


def shape_of(name: str, config: Mapping[str, Any], *, mixtures: bool = False) -> ModelShape:
    """Return the shape of the decoder that a transformers config describes. Raise InvalidInput for any other model.

    `mixtures`: a mixture of experts is accepted too.
    """
    _counted(name, config)
    whole, (config, _) = config, filled(text_of(config))
    try:
        check(config)
        tower = tower_of(whole)
    except ValueError as e:
        raise _invalid(f"config.json of {name!r} has {e}") from None
    family = str(config.get("model_type", ""))
    experts = next((config[k] for k in EXPERTS if config.get(k)), 0)
    _plain(name, family, config, mixtures=mixtures and family in MIXTURES)
    try:
        _known_names(family, config)
        _divisible(config)
        return ModelShape(
            name=name,
            family=family,
            layers=parameter_count.number(config, "num_hidden_layers", "n_layer"),
            hidden=parameter_count.number(config, "hidden_size", "n_embd"),
            intermediate=parameter_count.number(config, "moe_intermediate_size", default=parameter_count.inner(config))
            if experts
            else parameter_count.inner(config),
            experts=experts and parameter_count.number(config, *EXPERTS),
            active_experts=experts and parameter_count.number(config, "num_experts_per_tok", default=2),
            heads=parameter_count.number(config, "num_attention_heads", "n_head"),
            kv_heads=parameter_count.kv_heads(config),
            head_dim=parameter_count.head_dim(config),
            vocabulary=parameter_count.number(config, "vocab_size"),
            parameters=parameter_count.parameters(config) + (tower.parameters if tower else 0),
            tower=tower,
            known=family in FAMILIES,
            max_positions=parameter_count.positions(config),
            **_traits(family, config),
        )
    except ValueError as e:
        raise _invalid(f"config.json of {name!r} has {e}") from None


def _known_names(family: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown architecture whose config lacks the names that llama uses for sizes."""
    if family in FAMILIES:
        return
    names = ("num_hidden_layers", "n_layer"), ("hidden_size", "n_embd"), ("intermediate_size", "n_inner")
    lacking = [alternatives[0] for alternatives in names if all(config.get(n) is None for n in alternatives)]
    if lacking and not family:
        raise ValueError(f"no model_type and no positive {lacking[0]}, so it is not a model's")
    if lacking:
        supported = ", ".join(sorted(FAMILIES))
        raise ValueError(f"no positive {lacking[0]}, and {family!r} is not an architecture that is known: {supported}")


def _divisible(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a number of heads that does not divide the hidden size, or that key heads do not divide."""
    hidden, heads = (
        parameter_count.number(config, "hidden_size", "n_embd"),
        parameter_count.number(config, "num_attention_heads", "n_head"),
    )
    shared = parameter_count.kv_heads(config)
    if config.get("head_dim") is None and hidden % heads:
        raise ValueError(f"a hidden_size of {hidden}, which {heads} heads do not divide")
    if heads % shared:
        raise ValueError(f"{heads} heads, which {shared} heads of keys do not divide")


def _windowed(family: str, config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return which layers have the window, by the config or its class; empty: all layers."""
    layers = parameter_count.number(config, "num_hidden_layers", "n_layer")
    layer_types = config.get("layer_types")
    if (
        isinstance(layer_types, Sequence)
        and len(layer_types) >= layers
        and family not in ("mistral", "phi3", "starcoder2")
    ):
        return tuple(kind == "sliding_attention" for kind in layer_types[:layers])
    if family in ("qwen2", "qwen3"):
        first = config.get("max_window_layers")
        return tuple(i >= (28 if first is None else first) for i in range(layers))
    if family == "smollm3":  # the layers without rotary positions
        every = parameter_count.number(config, "no_rope_layer_interval", default=4)
        return tuple((i + 1) % every == 0 for i in range(layers))
    patterns = {"gemma2": 2, "gemma3_text": config.get("sliding_window_pattern") or 6}
    full = (patterns | {"cohere2": config.get("sliding_window_pattern") or 4}).get(family, 0)
    return tuple(bool((i + 1) % full) for i in range(layers)) if full else ()


def _traits(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the shape that differ within a family, by default as in transformers' config classes."""
    plain = {"gpt2": "gelu_new", "gpt_bigcode": "gelu_pytorch_tanh", "phi": "gelu_new"}
    activation = next((str(config[k]) for k in ACTIVATION_KEYS if config.get(k)), plain.get(family, "silu"))
    rates = "resid_pdrop", "residual_dropout", "hidden_dropout"
    default = 0.1 if family in ("gpt2", "gpt_bigcode") else 0.0
    rate = next((config[k] for k in rates if config.get(k) is not None), default)
    is_new_decoder = bool(config.get("new_decoder_architecture"))
    parallel = {
        "falcon": is_new_decoder or bool(config.get("parallel_attn", True)),
        "gpt_neox": bool(config.get("use_parallel_residual", True)),
        "phi": True,
        "cohere2": True,
    }.get(family, False)
    window = config.get("sliding_window", 4096 if family in WINDOWED else None)
    if "use_sliding_window" in config or family in ("qwen2", "qwen3", "qwen3_moe", "smollm3"):
        window = window if config.get("use_sliding_window") else None
    norms = 2 if family == "gpt_neox" or (is_new_decoder and config.get("num_ln_in_parallel_attn") != 1) else 1
    return {
        "tied_embeddings": parameter_count.is_tied(config),
        "gated_mlp": family not in PLAIN_MLP,
        "activation": activation,
        "parallel": parallel,
        "parallel_norms": norms,
        "head_norms": family == "phi" and bool(config.get("qk_layernorm")),
        "softcap": family in CAPPED and config.get("final_logit_softcapping", CAPPED[family]) is not None,
        "window": window,
        "windowed": _windowed(family, config) if window else (),
        "dropout": isinstance(rate, int | float) and rate > 0,
    }

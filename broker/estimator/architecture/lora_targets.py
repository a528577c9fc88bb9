"""Choice of the modules that a LoRA adapts, by peft's rules over transformers' module names.

A name in a list matches a module of that whole name, or of a name ending in a dot and the listed name. A single pattern
must match the whole name. The regular expression engine runs in linear time, so no pattern can hang.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from pydantic_core import SchemaError, SchemaValidator, core_schema

from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import ATTENTION_ROLES, CROSS, family_spec
from trainer.contract.suggestions import close_matches

ALL_LINEAR = "all-linear"
HEAD, EMBEDDINGS, POOLER = "head", "embeddings", "pooler"
"""Names for modules outside the layers, used in addition to the roles of a layer's modules."""
LONGEST = 1000
"""Longest accepted pattern, in characters."""


@dataclass(frozen=True, kw_only=True)
class _Tree:
    """Module paths of a decoder or encoder: its layers, and the parents of attention and MLP in each layer."""

    layers: str = "model.layers"
    attention: str = "self_attn"
    mlp: str = "mlp"
    embeddings: str = ""
    """Path of the embeddings; empty: their adapter is not estimated."""
    own: Mapping[str, str]
    """Parents by role, where they differ from `attention` and `mlp`."""


def _tree(layers: str, attention: str, mlp: str, embeddings: str = "", **own: str) -> _Tree:
    return _Tree(layers=layers, attention=attention, mlp=mlp, embeddings=embeddings, own=own)


_LLAMA = _tree("model.layers", "self_attn", "mlp", "model.embed_tokens")
_GPT = _tree("transformer.h", "attn", "mlp", "transformer.wte")
_BERT = {"o": "attention.output", "fc": "intermediate", "proj": "output"}
_TREES: Mapping[str, _Tree] = {
    "falcon": _tree("transformer.h", "self_attention", "mlp", "transformer.word_embeddings"),
    "gpt_neox": _tree("gpt_neox.layers", "attention", "mlp", "gpt_neox.embed_in"),
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "bert": _tree("bert.encoder.layer", "attention.self", "", **_BERT),
    "roberta": _tree("roberta.encoder.layer", "attention.self", "", **_BERT),
    "distilbert": _tree("distilbert.transformer.layer", "attention", "ffn"),
    "vit": _tree("vit.layers", "attention", "mlp"),
    "mixtral": _tree("model.layers", "self_attn", "block_sparse_moe.experts.0", "model.embed_tokens"),
    "qwen3_moe": _tree("model.layers", "self_attn", "mlp.experts.0", "model.embed_tokens"),
}
"""Module paths by family. An unknown family is treated as a llama. Expert 0 represents all experts of a mixture."""
_PAIRS: Mapping[str, tuple[tuple[str, str, str, str], tuple[str, str, str, str]]] = {
    "t5": (
        ("encoder.block", "layer.0.SelfAttention", "", "layer.1.DenseReluDense"),
        ("decoder.block", "layer.0.SelfAttention", "layer.1.EncDecAttention", "layer.2.DenseReluDense"),
    ),
    "bart": (
        ("model.encoder.layers", "self_attn", "", ""),
        ("model.decoder.layers", "self_attn", "encoder_attn", ""),
    ),
}
"""(layers, parents of attention, cross attention and MLP) of encoder and decoder."""
_HEADS = ("lm_head", "embed_out")
"""Names of a language model's head. GPT-NeoX used the second until transformers 5."""
_EMBEDDED = ("word_embeddings", "position_embeddings", "token_type_embeddings")
_UNESTIMATED: Mapping[str, tuple[str, ...]] = {
    "t5": ("lm_head", "shared", "encoder.embed_tokens", "decoder.embed_tokens"),
    "bart": (
        "lm_head", "model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens",
        "model.encoder.embed_positions", "model.decoder.embed_positions",
    ),
    "gpt2": ("transformer.wpe",),
    "gpt_bigcode": ("transformer.wpe",),
    "bert": tuple(f"bert.embeddings.{name}" for name in _EMBEDDED),
    "roberta": tuple(f"roberta.embeddings.{name}" for name in _EMBEDDED),
    "distilbert": tuple(f"distilbert.embeddings.{name}" for name in _EMBEDDED[:2]),
}  # fmt: skip
"""Modules that peft can adapt, but whose adapters are not estimated."""


@dataclass(frozen=True, kw_only=True)
class SelectedModules:
    """Result of matching LoRA targets with a model's modules.

    `roles`: roles of the chosen modules. `missing`: targets that match no module. `partly`: roles chosen in some layers
    only.
    """

    roles: frozenset[str]
    missing: tuple[str, ...] = ()
    partly: frozenset[str] = frozenset()


def _in_layers(shape: ModelShape, roles: Mapping[str, str]) -> Iterator[tuple[str, str, str, int]]:
    """Yield (role, name before the layer's number, name after it, number of layers)."""
    if shape.decoder_layers:
        depths = shape.layers, shape.decoder_layers
        for (layers, attention, cross, mlp), depth in zip(_PAIRS[shape.family], depths, strict=True):
            for role, name in roles.items():
                other = role.startswith(CROSS)
                if not other or cross:
                    parent = cross if other else attention if role in ATTENTION_ROLES else mlp
                    yield role, f"{layers}.", _behind(parent, name), depth
        return
    tree = _TREES.get(shape.family, _LLAMA)
    for role, name in roles.items():
        parent = tree.own.get(role, tree.attention if role in ATTENTION_ROLES else tree.mlp)
        yield role, f"{tree.layers}.", _behind(parent, name), shape.layers


def _behind(parent: str, name: str) -> str:
    return f".{parent}.{name}" if parent else f".{name}"


def _modules(shape: ModelShape, roles: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (role, whole name) of every module that can get an adapter."""
    for role, before, behind, layers in _in_layers(shape, roles):
        for number in range(layers):
            yield role, f"{before}{number}{behind}"
    if shape.pooled_adapter:
        yield POOLER, "bert.pooler.dense"
    if shape.decoder_layers or family_spec(shape).encoder:
        return
    yield EMBEDDINGS, _TREES.get(shape.family, _LLAMA).embeddings
    if shape.head == "tokens":
        for name in _HEADS if shape.family == "gpt_neox" else _HEADS[:1]:
            yield HEAD, name


def _refused(shape: ModelShape, roles: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (whole name, reason) of modules that a target must not choose."""
    parents = {(before, behind.rpartition(".")[0], count) for _, before, behind, count in _in_layers(shape, roles)}
    for before, parent, count in sorted(parents):
        for number in range(count):
            yield f"{before}{number}{parent}", "which is not a linear module: peft refuses it"
    for name in _UNESTIMATED.get(shape.family, ()):
        yield name, "whose adapter is not estimated"


def known_names(shape: ModelShape, roles: Mapping[str, str]) -> tuple[str, ...]:
    """Return the last component of the names of all modules that can be chosen."""
    return tuple(dict.fromkeys(name.rpartition(".")[2] for _, name in _modules(shape, roles)))


def nearest(target: str, names: tuple[str, ...]) -> str:
    """Return `, the nearest is q_proj`, or an empty string without a close match."""
    nearest = close_matches(target.rpartition(".")[2], names, n=1)
    return f", the nearest is {nearest[0]}" if nearest else ""


def _named(target: str) -> Callable[[str], bool]:
    end = f".{target}"
    return lambda name: name == target or name.endswith(end)


def _pattern(target: str) -> Callable[[str], bool]:
    """Return a test for the pattern. Raise ValueError if the engine does not support the pattern."""
    try:
        if len(target) > LONGEST:
            raise ValueError(f"is longer than {LONGEST} characters")
        schema = core_schema.str_schema(pattern=f"^(?:{target})$", regex_engine="rust-regex")
        return SchemaValidator(schema).isinstance_python
    except SchemaError:
        raise ValueError(
            "is not a valid regular expression; look-around and backreferences are not supported, give a list of names"
        ) from None


@lru_cache(maxsize=256)
def choose(shape: ModelShape, targets: tuple[str, ...] | str, roles: tuple[tuple[str, str], ...]) -> SelectedModules:
    """Return the modules that the targets choose.

    `targets` are names, or one pattern. `roles` are (role, name) of a layer's linear modules. Raise ValueError for an
    invalid pattern, and for targets that choose a module without a supported adapter.
    """
    role_names = dict(roles)
    if targets in (ALL_LINEAR, (ALL_LINEAR,)):
        return SelectedModules(roles=frozenset(role_names) | ({POOLER} if shape.pooled_adapter else set()))
    tests = {targets: _pattern(targets)} if isinstance(targets, str) else {t: _named(t) for t in targets}
    for name, why in _refused(shape, role_names):
        if any(test(name) for test in tests.values()):
            raise ValueError(f"matches {name}, {why}")
    total: Counter[str] = Counter()
    matched: Counter[str] = Counter()
    used_targets: set[str] = set()
    for role, name in _modules(shape, role_names):
        matching = [target for target, test in tests.items() if test(name)]
        used_targets.update(matching)
        total[role] += 1
        matched[role] += bool(matching)
    roles_found = frozenset(role for role, count in matched.items() if count)
    return SelectedModules(
        roles=roles_found,
        missing=tuple(target for target in tests if target not in used_targets),
        partly=frozenset(role for role in roles_found - {HEAD} if matched[role] < total[role]),
    )

"""Structure of one layer of each model family, and the element widths of its weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from broker.domain.workload import ModelShape


@dataclass(frozen=True, kw_only=True)
class FamilySpec:
    """Structure of a family's layer; `names` maps the role of each linear module to its name."""

    names: Mapping[str, str]
    norm: Literal["rms", "gemma", "layer", "olmo", "cohere"] = "rms"
    norms: Literal[1, 2, 4] = 2
    """Norms in a layer. With 4, attention and MLP each have a norm before and a norm after."""
    output_norms: bool = False
    """Attention and MLP have a norm after each, before its residual connection, and none before (OLMo 2)."""
    head_norms: bool = False
    whole_norms: bool = False
    """The norms of queries and of keys are over all heads together, not over each head."""
    rotary: bool = True
    scaled: bool = False
    """The outputs of attention and MLP, embeddings and logits are multiplied by a constant (granite)."""
    scaled_logits: bool = False
    """The logits alone are multiplied by a constant."""
    scaled_embeddings: bool = False
    cached_casts: bool = True
    """Autocast caches the half-precision copies of weights. False where matrices are transposed before their product,
    because autocast then does not recognise its earlier copies.
    """
    normed_first: bool = False
    """Both norms are computed first if attention and MLP are parallel, and Python variables hold them until the layer
    ends.
    """
    added_in_turn: bool = False
    """The outputs of parallel attention and MLP are added one after the other. Python variables hold them, and the
    norm's output, until the layer ends.
    """
    wide_rotary: bool = False
    """Rotary positions are applied in float32, to queries and keys together."""
    masked: bool = False
    """A mask is made for each row, even where a kernel could derive it."""
    mask_buffer: bool = False
    """The model holds a causal mask over all its positions, one byte for each pair."""
    encoder: bool = False
    """All tokens attend to each other; a head without a vocabulary reads the result."""
    norm_after: bool = False
    """Each norm follows its residual connection (BERT), instead of preceding attention and MLP."""
    named: bool = False
    """Python variables hold the inputs of the last matrices of attention and MLP until the norm after each is done."""
    names_attended: bool = False
    """A Python variable holds the output of attention until the layer ends, if the MLP follows attention."""
    unquantised: frozenset[str] = frozenset()
    """Roles of the matrices that are never quantised."""
    capped_scores: bool = False
    """The scores of attention are divided, passed through tanh and multiplied."""
    drops: bool = True
    """Dropout is applied to the output of attention, if the model uses dropout at all."""
    broadcast: bool = False
    """Keys with fewer heads reach the attention unexpanded. No fused kernel accepts that, so the scores are
    materialised.
    """


SPLIT = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
GATED = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
LLAMA = FamilySpec(names=SPLIT | GATED)
BLOOM_NAMES = {"qkv": "query_key_value", "o": "dense", "fc": "dense_h_to_4h", "proj": "dense_4h_to_h"}
GPT_NAMES = {"qkv": "c_attn", "o": "c_proj", "fc": "c_fc", "proj": "c_proj"}
BERT = FamilySpec(
    names={"q": "query", "k": "key", "v": "value", "o": "dense", "fc": "dense", "proj": "dense"},
    norm="layer", rotary=False, encoder=True, norm_after=True, named=True,
)  # fmt: skip
FAMILIES: Mapping[str, FamilySpec] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": FamilySpec(names=SPLIT | GATED, head_norms=True),
    "smollm3": LLAMA,
    "mixtral": FamilySpec(names=SPLIT | {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen3_moe": FamilySpec(names=SPLIT | GATED, head_norms=True),
    "granite": FamilySpec(names=SPLIT | GATED, scaled=True, scaled_embeddings=True),
    "phi3": FamilySpec(names={"qkv": "qkv_proj", "o": "o_proj", "gate_up": "gate_up_proj", "down": "down_proj"}),
    "gemma": FamilySpec(names=SPLIT | GATED, norm="gemma", scaled_embeddings=True),
    "gemma2": FamilySpec(names=SPLIT | GATED, norm="gemma", norms=4, scaled_embeddings=True, capped_scores=True),
    "gemma3_text": FamilySpec(names=SPLIT | GATED, norm="gemma", norms=4, head_norms=True, scaled_embeddings=True),
    "olmo2": FamilySpec(names=SPLIT | GATED, norm="olmo", output_norms=True, head_norms=True, whole_norms=True),
    "cohere2": FamilySpec(
        names=SPLIT | GATED, norm="cohere", norms=1, scaled_logits=True, added_in_turn=True, wide_rotary=True
    ),
    "falcon": FamilySpec(
        names=BLOOM_NAMES,
        norm="layer",
        broadcast=True,
        cached_casts=False,
        masked=True,
        normed_first=True,
        names_attended=True,
    ),
    "gpt_neox": FamilySpec(names=BLOOM_NAMES, norm="layer"),
    "gpt2": FamilySpec(names=GPT_NAMES, norm="layer", rotary=False, names_attended=True),
    "gpt_bigcode": FamilySpec(names=GPT_NAMES, norm="layer", rotary=False, mask_buffer=True, names_attended=True),
    "phi": FamilySpec(names=SPLIT | {"o": "dense", "fc": "fc1", "proj": "fc2"}, norm="layer"),
    "bert": BERT,
    "roberta": BERT,
    "distilbert": FamilySpec(
        names={"q": "q_lin", "k": "k_lin", "v": "v_lin", "o": "out_lin", "fc": "lin1", "proj": "lin2"},
        norm="layer",
        rotary=False,
        encoder=True,
        norm_after=True,
        drops=False,
    ),
    "vit": FamilySpec(names=SPLIT | {"fc": "fc1", "proj": "fc2"}, norm="layer", rotary=False, encoder=True),
    "starcoder2": FamilySpec(names=SPLIT | {"fc": "c_fc", "proj": "c_proj"}, norm="layer"),
}
ATTENTION_ROLES = frozenset({"q", "k", "v", "o", "qkv"})
CROSS = "cross "
"""Prefix of the roles of a decoder's matrices for cross attention, which reads the encoder's output."""
ATTEND = {"q": "q", "k": "k", "v": "v", "o": "o"}
PROJECT = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}


def _pair(attention: Mapping[str, str], mlp: Mapping[str, str], **more: Any) -> FamilySpec:
    """Return the structure of an encoder-decoder family, whose decoder has self attention and cross attention."""
    twice = {**attention, **{CROSS + role: name for role, name in attention.items()}}
    return FamilySpec(names={**twice, **mlp}, rotary=False, **more)


T5_GATED = _pair(ATTEND, {"gate": "wi_0", "up": "wi_1", "down": "wo"}, unquantised=frozenset({"down"}))
PAIRS: Mapping[str, FamilySpec] = {
    "t5": _pair(ATTEND, {"fc": "wi", "proj": "wo"}, unquantised=frozenset({"proj"})),
    "bart": _pair(PROJECT, {"fc": "fc1", "proj": "fc2"}, norm="layer", norm_after=True),
}
"""Structure of the encoder-decoder families."""


def family_spec(shape: ModelShape) -> FamilySpec:
    """Return the structure of the model's family. An unknown family is treated as a llama, and its evidence says so."""
    if shape.family in PAIRS:
        return T5_GATED if shape.family == "t5" and shape.gated_mlp else PAIRS[shape.family]
    return FAMILIES.get(shape.family, LLAMA)


def stacks(shape: ModelShape) -> tuple[ModelShape, ...]:
    """Return the model's stacks of layers in the order of computation: one, or the encoder and the decoder."""
    if not shape.decoder_layers:
        return (shape,)
    decoder = replace(shape, layers=shape.decoder_layers, intermediate=shape.decoder_intermediate)
    return replace(shape, decoder_layers=0), decoder


def copies(shape: ModelShape, role: str) -> int:
    """Return the number of matrices of that role in a layer: one, or one for each expert."""
    return 1 if not shape.experts or role in ("q", "k", "v", "qkv", "o") else shape.experts


def layer_matrices(shape: ModelShape) -> int:
    """Return the number of weights in all linear modules of a layer."""
    return sum(i * o * copies(shape, role) for role, (i, o) in linears(shape).items())


def linears(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of a layer's linear modules by role."""
    h, i, q, kv = shape.hidden, shape.intermediate, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "q": (h, q), "k": (h, kv), "v": (h, kv), "qkv": (h, q + 2 * kv), "o": (q, h),
        "gate": (h, i), "up": (h, i), "gate_up": (h, 2 * i), "down": (i, h), "fc": (h, i), "proj": (i, h),
    }  # fmt: skip
    roles = {role: role.removeprefix(CROSS) for role in family_spec(shape).names}
    return {role: sizes[own] for role, own in roles.items() if role == own or shape.decoder_layers}


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Types of weights, gradients and arithmetic; each width is in bytes per element."""

    weight: int
    """Width of base weights that are not quantised."""
    trained: int
    """Width of each trained weight, of its gradient and of each AdamW moment."""
    adapters: int = 4
    """Width of LoRA weights during computation, and of their gradients before reduction."""
    compute: int
    full: bool
    """Every weight is trained; False: adapters only."""
    autocast: bool = False
    bits: Literal[0, 4, 8] = 0
    """Bits of a frozen base's linear weights; 0: not quantised."""
    norms_float32: bool = False
    """Norms of a quantised base are cast to float32, as TRL does under autocast."""
    rest_float32: bool = False
    """All weights of a quantised base that are not quantised are in float32, as peft's preparation does."""
    single_scales: bool = False
    """The scales of 4-bit weights are float32, not quantised themselves."""
    head_bits: Literal[0, 4, 8] = 0
    """Bits of the head's weights; 0: the head is not quantised."""
    fused: bool = False
    """Norms and rotary positions are single kernels without float32 intermediates."""
    attention: Literal["sdpa", "flash", "eager"] = "sdpa"
    rank: int = 0
    dropout: bool = True
    mask: int = 1
    """Width of a dropout mask; 0: as wide as the tensor it is applied to, as on a CPU."""
    experts_in_turn: bool = False
    """A mixture computes one expert after another, as transformers did before 5.0."""
    repeated_keys: bool = False
    """Keys and values with fewer heads are repeated for every query head before a kernel that could share them."""
    presents: bool = False
    """Every layer returns its keys and values. They are views of the fused projection, and live until the loss exists.
    """
    adapted: frozenset[str] = frozenset()
    """Roles of the linear modules that have an adapter."""

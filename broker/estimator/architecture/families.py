"""How the layers of each family are put together, and how their weights are held."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from broker.domain.workload import ModelShape


@dataclass(frozen=True, kw_only=True)
class FamilySpec:
    """How a family's layer is put together; `names` are its linear modules by what they do."""

    names: Mapping[str, str]
    norm: Literal["rms", "gemma", "layer"] = "rms"
    norms: Literal[2, 4] = 2
    """Four: also behind attention and MLP."""
    head_norms: bool = False
    rotary: bool = True
    scaled: bool = False
    """Attention's and the MLP's outputs, embeddings and logits are multiplied by a constant (granite)."""
    scaled_embeddings: bool = False
    cached_casts: bool = True
    """False: matrices are transposed before their product, so autocast does not know their casts again."""
    normed_first: bool = False
    """Where attention and MLP are side by side, both norms are computed before, and have names to the layer's end."""
    masked: bool = False
    """A mask is made for each row, also where a kernel would know it by itself."""
    mask_buffer: bool = False
    """The model holds a causal mask over all its positions, a byte for each pair."""
    encoder: bool = False
    """All tokens see each other; a head reads what comes out, and no vocabulary."""
    behind: bool = False
    """Norms stand behind each residual connection (BERT), not before attention and MLP."""
    named: bool = False
    """What goes into the last matrix of attention and MLP has a name in Python until the norm behind it is done."""
    names_attended: bool = False
    """What attention made has a name in Python to the layer's end, where the MLP comes after it."""
    kept: frozenset[str] = frozenset()
    """Matrices that are not quantised with the others."""
    drops: bool = True
    """Attention's output is dropped out, where anything is."""
    broadcast: bool = False
    """Keys of fewer heads reach the attention unexpanded: no fused kernel takes that, so the scores are written out."""


SPLIT = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
GATED = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
LLAMA = FamilySpec(names=SPLIT | GATED)
BLOOM_NAMES = {"qkv": "query_key_value", "o": "dense", "fc": "dense_h_to_4h", "proj": "dense_4h_to_h"}
GPT_NAMES = {"qkv": "c_attn", "o": "c_proj", "fc": "c_fc", "proj": "c_proj"}
BERT = FamilySpec(
    names={"q": "query", "k": "key", "v": "value", "o": "dense", "fc": "dense", "proj": "dense"},
    norm="layer", rotary=False, encoder=True, behind=True, named=True,
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
    "gemma2": FamilySpec(names=SPLIT | GATED, norm="gemma", norms=4, scaled_embeddings=True),
    "gemma3_text": FamilySpec(names=SPLIT | GATED, norm="gemma", norms=4, head_norms=True, scaled_embeddings=True),
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
        behind=True,
        drops=False,
    ),
    "vit": FamilySpec(names=SPLIT | {"fc": "fc1", "proj": "fc2"}, norm="layer", rotary=False, encoder=True),
    "starcoder2": FamilySpec(names=SPLIT | {"fc": "c_fc", "proj": "c_proj"}, norm="layer"),
}
ATTENTION_ROLES = frozenset({"q", "k", "v", "o", "qkv"})
CROSS = "cross "
"""Begins what the matrices of a decoder do that look at what the encoder made."""
ATTEND = {"q": "q", "k": "k", "v": "v", "o": "o"}
PROJECT = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}


def _pair(attention: Mapping[str, str], mlp: Mapping[str, str], **more: Any) -> FamilySpec:
    """Of an encoder-decoder: its decoder attends twice."""
    twice = {**attention, **{CROSS + role: name for role, name in attention.items()}}
    return FamilySpec(names={**twice, **mlp}, rotary=False, **more)


T5_GATED = _pair(ATTEND, {"gate": "wi_0", "up": "wi_1", "down": "wo"}, kept=frozenset({"down"}))
PAIRS: Mapping[str, FamilySpec] = {
    "t5": _pair(ATTEND, {"fc": "wi", "proj": "wo"}, kept=frozenset({"proj"})),
    "bart": _pair(PROJECT, {"fc": "fc1", "proj": "fc2"}, norm="layer", behind=True),
}
"""Encoder-decoders."""


def family_spec(shape: ModelShape) -> FamilySpec:
    """The family's; an unknown family is taken for a llama, which its evidence says."""
    if shape.family in PAIRS:
        return T5_GATED if shape.family == "t5" and shape.gated_mlp else PAIRS[shape.family]
    return FAMILIES.get(shape.family, LLAMA)


def stacks(shape: ModelShape) -> tuple[ModelShape, ...]:
    """The model's stacks of layers in the order of their work: one, or the encoder and the decoder."""
    if not shape.decoder_layers:
        return (shape,)
    decoder = replace(shape, layers=shape.decoder_layers, intermediate=shape.decoder_intermediate)
    return replace(shape, decoder_layers=0), decoder


def copies(shape: ModelShape, role: str) -> int:
    """How many such matrices a layer has: one, or one for every expert."""
    return 1 if not shape.experts or role in ("q", "k", "v", "qkv", "o") else shape.experts


def layer_matrices(shape: ModelShape) -> int:
    """Weights of all linear modules of a layer."""
    return sum(i * o * copies(shape, role) for role, (i, o) in linears(shape).items())


def linears(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of a layer's linear modules by what they do."""
    h, i, q, kv = shape.hidden, shape.intermediate, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "q": (h, q), "k": (h, kv), "v": (h, kv), "qkv": (h, q + 2 * kv), "o": (q, h),
        "gate": (h, i), "up": (h, i), "gate_up": (h, 2 * i), "down": (i, h), "fc": (h, i), "proj": (i, h),
    }  # fmt: skip
    roles = {role: role.removeprefix(CROSS) for role in family_spec(shape).names}
    return {role: sizes[own] for role, own in roles.items() if role == own or shape.decoder_layers}


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """How weights are held and what is computed in; widths are bytes an element."""

    weight: int
    """Of base weights that are not quantised."""
    trained: int
    """Of each trained weight, its gradient and each of AdamW's moments."""
    adapters: int = 4
    """Of LoRA's weights as they are computed with, and of their gradients before they are reduced."""
    compute: int
    full: bool
    """Every weight is trained; False: adapters only."""
    autocast: bool = False
    bits: Literal[0, 4, 8] = 0
    """Of a frozen base's linear weights; 0: not quantised."""
    norms_float32: bool = False
    """Norms of a quantised base are raised to float32, as TRL does under autocast."""
    attention: Literal["sdpa", "flash", "eager"] = "sdpa"
    rank: int = 0
    dropout: bool = True
    mask: int = 1
    """Of a dropout's mask; 0: as wide as what is dropped out, as a CPU has it."""
    experts_in_turn: bool = False
    """A mixture computes one expert after the other, as transformers did before 5.0."""
    repeated_keys: bool = False
    """Keys and values of fewer heads are repeated for every query's before the kernel, which would share them."""
    presents: bool = False
    """Every layer returns its keys and values, views of all that was computed with them; held until there is a loss."""
    adapted: frozenset[str] = frozenset()
    """What the adapted linear modules do."""

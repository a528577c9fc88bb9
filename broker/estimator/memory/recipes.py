"""Recipes: how other training libraries hold weights and compute the loss, as facts read from their code.

A recipe changes the types of `Numerics`, the form of the loss and the margin. No fact was fitted to measurements.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import Numerics
from broker.estimator.memory.simulator.library_versions import TRAINER_RELEASES
from broker.estimator.memory.simulator.loss_forms import ChunkedLoss, HeldLoss, InPlaceLoss, LossForm

RecipeName = Literal[
    "gpubroker", "hf-trainer", "peft-kbit", "trl", "axolotl", "unsloth", "torchtune", "litgpt", "fms-foak"
]
RECIPES: tuple[RecipeName, ...] = get_args(RecipeName)
NEWEST = ".".join(map(str, TRAINER_RELEASES[-1]))


@dataclass(frozen=True, kw_only=True)
class LibraryRecipe:
    """Facts of one library. The defaults are those of the trainer."""

    source: str = ""
    """Code that the facts were read from; empty: the trainer's own."""
    on_transformers: bool = False
    """The models are those of transformers, whose newest checked release is assumed without `--stack`."""
    full: Literal["float32", "loaded"] = "float32"
    """Type of trained weights under autocast on one copy: float32, or half precision as loaded."""
    lora_base: Literal["half", "float32"] = "half"
    """Type of an unquantised frozen base under autocast."""
    adapters: Literal["float32", "half"] = "float32"
    quantised_adapters: Literal["float32", "half"] = "float32"
    """Type of the adapters of an unquantised and of a quantised base."""
    rest: Literal["norms", "all", "none"] = "norms"
    """Weights of a quantised base that are raised to float32: norms by `--norms`, all that are not quantised, none."""
    double_quantised: bool = True
    """The scales of 4-bit weights are quantised too."""
    head_quantised: bool = False
    untied: bool = False
    """The head is a matrix of its own even if the config ties it to the embeddings."""
    fused_kernels: bool = False
    """Norms and rotary positions are one kernel each, without float32 intermediates."""
    chunks: int = 0
    """Parts in which head and loss are computed; 0: at once."""
    chunk_bytes: int = 0
    """Bytes of each logit of a chunk that live until the backward pass."""
    in_place: bool = False
    """The gradient of the logits is written into the logits, and no log-probabilities are kept."""
    holds_logits: bool = False
    """The training loop holds the model's output, and with it the logits, through the whole step."""
    margin: float = 0.0
    """Least margin of an estimate by this recipe [assumed]: nothing of the recipe was traced."""
    not_counted: str = ""
    """Properties of the library that the estimate leaves out, all of which need less memory than estimated."""


KNOWN: Mapping[RecipeName, LibraryRecipe] = {
    "gpubroker": LibraryRecipe(),
    "hf-trainer": LibraryRecipe(
        source="transformers 5.24: Trainer with dtype=auto casts no weights",
        on_transformers=True, full="loaded", margin=0.05,
    ),
    "peft-kbit": LibraryRecipe(
        source="peft 0.21.2: prepare_model_for_kbit_training raises all that is not quantised to float32; a plain loop",
        on_transformers=True, full="loaded", rest="all", holds_logits=True, margin=0.10,
    ),
    "trl": LibraryRecipe(
        source="trl 1.16: SFTTrainer loads float32, casts adapters of a quantised base to bf16, and fuses the loss",
        on_transformers=True, lora_base="float32", quantised_adapters="half", rest="none", chunks=64, margin=0.15,
    ),
    "axolotl": LibraryRecipe(
        source="axolotl 0.19: norms, embeddings and head are cast back to the loaded type after peft's preparation",
        on_transformers=True, full="loaded", rest="none", margin=0.15,
    ),
    "unsloth": LibraryRecipe(
        source="unsloth and unsloth-zoo 2026.10.9: fused norms and rotary positions, head and loss in chunks",
        on_transformers=True, full="loaded", rest="none", fused_kernels=True, chunks=4, margin=0.35,
        not_counted="fused LoRA, and checkpoints in host memory",
    ),
    "torchtune": LibraryRecipe(
        source="torchtune 0.6.1: adapters in the model's type, eight chunks of logits",
        full="loaded", adapters="half", quantised_adapters="half", rest="none", fused_kernels=True, chunks=8,
        chunk_bytes=2, margin=0.35, not_counted="torch.compile, offloaded activations, and optimizers in the backward",
    ),
    "litgpt": LibraryRecipe(
        source="litgpt 0.5.13: bf16-true, a head of its own, chunks of 128 tokens; bnb.nf4 quantises the head too",
        full="loaded", adapters="half", quantised_adapters="half", rest="none", double_quantised=False,
        head_quantised=True, untied=True, chunks=8, chunk_bytes=4, margin=0.25,
    ),
    "fms-foak": LibraryRecipe(
        source="fms-hf-tuning loads bf16; fms-acceleration-foak 0.7.4 fuses norms, rotary positions and the loss",
        on_transformers=True, full="loaded", fused_kernels=True, in_place=True, margin=0.15,
        not_counted="fused LoRA",
    ),
}  # fmt: skip


def version(name: RecipeName, stack: str | None) -> str | None:
    """Return the version of transformers: that of `--stack`, or the newest checked; None: other model code."""
    return NEWEST if stack is None and KNOWN[name].on_transformers else stack


def typed(name: RecipeName, n: Numerics, *, sharded: bool) -> Numerics:
    """Return the types of the recipe. `sharded`: FSDP keeps float32 shards of trained weights under autocast."""
    if name == "gpubroker":
        return n
    recipe, half = KNOWN[name], n.compute == 2
    if n.full:
        loaded = recipe.full == "loaded" and half and n.autocast and not sharded
        n = replace(n, weight=2, trained=2) if loaded else n
        return replace(n, fused=recipe.fused_kernels)
    width = recipe.quantised_adapters if n.bits else recipe.adapters
    if width == "half" and half:
        n = replace(n, adapters=2, trained=2)
    if recipe.lora_base == "float32" and n.autocast and not n.bits and not sharded:
        n = replace(n, weight=4)
    return replace(
        n,
        norms_float32=n.norms_float32 and recipe.rest == "norms",
        rest_float32=recipe.rest == "all" and n.bits > 0 and not sharded,
        single_scales=not recipe.double_quantised,
        head_bits=n.bits if recipe.head_quantised else 0,
        fused=recipe.fused_kernels,
    )


def shaped(name: RecipeName, shape: ModelShape) -> ModelShape:
    """Return the shape of the model as the library builds it."""
    if not (KNOWN[name].untied and shape.tied_embeddings and shape.head == "tokens"):
        return shape
    more = shape.vocabulary * shape.hidden
    return replace(shape, tied_embeddings=False, parameters=shape.parameters + more)


def loss_form(name: RecipeName, usual: LossForm) -> LossForm:
    """Return the form of the loss. `usual`: that of the model's own code in its version of transformers."""
    recipe = KNOWN[name]
    if recipe.in_place:
        return InPlaceLoss(inner=usual)
    if recipe.holds_logits:
        return HeldLoss(inner=usual)
    return ChunkedLoss(chunks=recipe.chunks, kept=recipe.chunk_bytes) if recipe.chunks else usual


def evidence_words(name: RecipeName) -> str:
    """Return the source of the recipe's facts, and what is left out."""
    recipe = KNOWN[name]
    rest = f"; not counted: {recipe.not_counted}" if recipe.not_counted else ""
    return f"recipe {name} by formula, from the code of {recipe.source}{rest}"

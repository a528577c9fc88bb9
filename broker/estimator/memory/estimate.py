"""Peak memory of a fine-tune on one device, and the evidence for the figure.

`EstimateOptions` uses the user's terms; this module translates them into numerics and a step for the simulator.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import ATTENTION_ROLES, Numerics, family_spec, linears
from broker.estimator.architecture.lora_targets import choose, known_names, nearest
from broker.estimator.architecture.model_states import STATES, divided, embedded
from broker.estimator.memory import device_overhead
from broker.estimator.memory.device_overhead import Estimate
from broker.estimator.memory.evidence import FORMULA, MEASURED, SHOWN_MORE, TRACED_OPTIMIZERS, Tier, evidence_of
from broker.estimator.memory.recipes import KNOWN, RECIPES, RecipeName, evidence_words, loss_form, shaped, typed
from broker.estimator.memory.recipes import version as recipe_version
from broker.estimator.memory.simulator import simulate
from broker.estimator.memory.simulator.library_versions import (
    CHECKED_MESSAGE,
    UNCHECKED_MARGIN,
    attention_of,
    is_checked,
    is_quantised,
    is_version_4,
    keeps_presents,
    loss_of,
    release_of,
    repeats_keys,
    table_bytes,
)
from broker.estimator.memory.simulator.tensors import CATEGORIES as CATEGORIES
from broker.estimator.memory.simulator.types import Step
from trainer.contract.architectures import QUANTISED_EXPERTS

Method = Literal["full", "lora", "qlora", "lora8", "adapter"]
"""Training method. `adapter`: any other adapter over a frozen base, given by its number of trained parameters."""
Precision = Literal["bf16", "fp16", "bf16-autocast", "fp16-autocast", "fp32"]
Sharding = Literal["none", "ddp", "fsdp", "hybrid", "tensor"]
"""Parallelism. `hybrid`: FSDP within a machine, DDP between machines. `tensor`: tensor parallelism within a machine,
DDP between machines.
"""
Attention = Literal["sdpa", "flash", "eager"]
Norms = Literal["float32", "half"]
"""Type of the norms of a quantised base under autocast: cast to float32, as TRL and the trainer do, or as loaded."""
METHODS, PRECISIONS, SHARDINGS, ATTENTIONS, NORMS = (
    get_args(t) for t in (Method, Precision, Sharding, Attention, Norms)
)
OPTIMIZERS = tuple(STATES)


@dataclass(frozen=True, kw_only=True)
class EstimateOptions:
    """Options of one fine-tune. `rows` and `length` are those of one device's micro-batch."""

    method: Method = "lora"
    optimizer: str = "adamw_fused"
    precision: Precision = "bf16-autocast"
    length: int = 2048
    target: int | None = None
    """Tokens of each row that an encoder-decoder generates; None: as many as it reads."""
    rows: int = 1
    accumulated: bool = False
    gpus: int = 1
    nodes: int = 1
    """Machines with an equal number of GPUs each."""
    sharding: Sharding = "none"
    offload: bool = False
    """FSDP keeps its shards in host memory."""
    checkpointing: bool = False
    rank: int = 16
    targets: tuple[str, ...] | str = ("all-linear",)
    """Module names, or one regular expression over whole names, as peft accepts them."""
    dropout: float = 0.05
    trainable: int | None = None
    """Parameters that method `adapter` trains; None for every other method."""
    attention: Attention = "sdpa"
    norms: Norms = "float32"
    transformers: str | None = None
    """transformers version whose built-in loss is computed; None: the trainer's loss, outside the model."""
    recipe: RecipeName = "gpubroker"
    """Library whose way of holding weights and computing the loss is estimated."""


class InvalidEstimate(ValueError):
    """Invalid options of an estimate; the message is one line that names the option."""


def adapted_modules(
    shape: ModelShape, targets: tuple[str, ...] | str, version: str | None = None
) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return (roles of the adapted modules, notes on the choice).

    As in peft, some names of a list may match no module. Raise InvalidEstimate if none matches.
    """
    names = family_spec(shape).names
    # From transformers 5 on all experts are one tensor, which is not a linear module.
    if shape.experts and not (version or "").startswith("4."):
        names = {role: name for role, name in names.items() if role in ATTENTION_ROLES}
    targets_text = targets if isinstance(targets, str) else ",".join(targets)
    try:
        chosen_targets = choose(shape, targets, tuple(names.items()))
    except ValueError as e:
        raise InvalidEstimate(f"--lora-targets {targets_text[:100]}: {e}") from None
    known_endings = known_names(shape, names)
    if not chosen_targets.roles:
        suggestion = nearest(chosen_targets.missing[0], known_endings) if chosen_targets.missing else ""
        architecture = f"{shape.family}{suggestion}; it has {', '.join(known_endings)}"
        raise InvalidEstimate(f"--lora-targets {targets_text[:200] or '(none)'} matches no module of {architecture}")
    notes = [
        f"LoRA target {name} matches no module of {shape.family}, and is ignored{nearest(name, known_endings)}"
        for name in chosen_targets.missing
    ]
    if chosen_targets.partly:
        words = ", ".join(sorted(names.get(role, role) for role in chosen_targets.partly))
        notes.append(f"the LoRA targets are in some layers only, and are estimated as if in all: {words}")
    return chosen_targets.roles, tuple(notes)


def check_numbers(ask: EstimateOptions) -> None:
    """Raise InvalidEstimate if a number is out of range."""
    sizes = (
        ("--seq", ask.length, 10**9),
        ("--target-seq", 1 if ask.target is None else ask.target, 10**9),
        ("--micro-batch", ask.rows, 10**6),
        ("--gpus", ask.gpus, 10**6),
        ("--nodes", ask.nodes, 10**6),
        ("--lora-r", ask.rank, 10**6),
    )
    for name, value, maximum in sizes:
        if value < 1:
            raise InvalidEstimate(f"{name} {value}: must be at least 1")
        if value > maximum:
            raise InvalidEstimate(f"{name} {value}: must be at most {maximum}")
    if not 0 <= ask.dropout < 1:
        raise InvalidEstimate(f"--lora-dropout {ask.dropout:g}: must be from 0 up to below 1")


def check(shape: ModelShape, ask: EstimateOptions) -> None:
    """Raise InvalidEstimate if the options contradict each other or the model."""
    check_numbers(ask)
    for name, length in (("--seq", ask.length), ("--target-seq", ask.target or 0)):
        if shape.max_positions is not None and length > shape.max_positions:
            raise InvalidEstimate(f"{name} {length}: the model has {shape.max_positions} positions; give no more")
    _check_pair(shape, ask)
    choices = (
        ("--method", ask.method, METHODS), ("--optimizer", ask.optimizer, OPTIMIZERS),
        ("--precision", ask.precision, PRECISIONS), ("--sharding", ask.sharding, SHARDINGS),
        ("--attention", ask.attention, ATTENTIONS), ("--norms", ask.norms, NORMS), ("--recipe", ask.recipe, RECIPES),
    )  # fmt: skip
    for name, value, allowed in choices:
        if value not in allowed:
            raise InvalidEstimate(f"{name} {value}: not one of {', '.join(allowed)}")
    _check_devices(shape, ask)
    _check_recipe(shape, ask)
    if (ask.method == "adapter") != (ask.trainable is not None):
        raise InvalidEstimate("--trainable-parameters N goes with --method adapter, and with no other")
    if ask.trainable is not None and not 1 <= ask.trainable <= shape.parameters:
        raise InvalidEstimate(f"--trainable-parameters {ask.trainable}: must be from 1 to {shape.parameters}")
    if ask.method in ("qlora", "lora8") and ask.precision == "fp32":
        raise InvalidEstimate(f"--precision fp32: {ask.method} computes in half precision; use bf16 or bf16-autocast")
    check_experts(ask, mixture=shape.experts > 0)


def check_experts(ask: EstimateOptions, *, mixture: bool) -> None:
    """Raise InvalidEstimate if the method quantises the base of a mixture, whose experts are tensors.

    They were linear modules in transformers 4, and are in libraries with model code of their own.
    """
    on_transformers = ask.recipe == "gpubroker" or KNOWN[ask.recipe].on_transformers
    if mixture and ask.method in ("qlora", "lora8") and on_transformers and not is_version_4(_release(ask)):
        raise InvalidEstimate(f"--method {ask.method}: {QUANTISED_EXPERTS}")


def _check_pair(shape: ModelShape, ask: EstimateOptions) -> None:
    """Raise InvalidEstimate for options that need an encoder-decoder, or that are not known for one."""
    if not shape.decoder_layers:
        if ask.target is not None:
            raise InvalidEstimate(f"--target-seq {ask.target}: {shape.family} is not an encoder-decoder; give --seq")
        return
    if ask.sharding not in ("none", "ddp"):
        raise InvalidEstimate(f"--sharding {ask.sharding}: not known for {shape.family}; use none or ddp")
    if ask.transformers is not None:
        raise InvalidEstimate(f"--stack transformers={ask.transformers}: not known for {shape.family}; leave it out")
    if ask.attention == "flash" and shape.buckets:
        raise InvalidEstimate(f"--attention flash: {shape.family} adds positions to its scores; use sdpa or eager")


def _check_devices(shape: ModelShape, ask: EstimateOptions) -> None:
    """Raise InvalidEstimate if the GPUs, machines and sharding do not go together."""
    if ask.gpus > 1 and ask.sharding == "none":
        raise InvalidEstimate(f"--gpus {ask.gpus} --sharding none: several GPUs need ddp, fsdp, hybrid or tensor")
    if ask.gpus % ask.nodes:
        some = f"for example --gpus {8 * ask.nodes}"
        raise InvalidEstimate(
            f"--nodes {ask.nodes}: --gpus {ask.gpus} cannot be divided between them; give the GPUs of all, {some}"
        )
    if ask.sharding == "hybrid" and (ask.nodes == 1 or ask.gpus == ask.nodes):
        raise InvalidEstimate("--sharding hybrid: needs several --nodes of several GPUs each; use fsdp")
    if ask.offload and ask.sharding not in ("fsdp", "hybrid"):
        raise InvalidEstimate(f"--offload goes with --sharding fsdp or hybrid, not with {ask.sharding}")
    if ask.sharding == "tensor" and (ask.method in ("qlora", "lora8") or "q" not in family_spec(shape).names):
        what = f"--method {ask.method}" if ask.method in ("qlora", "lora8") else shape.family
        raise InvalidEstimate(f"--sharding tensor: not known for {what}")


def _check_recipe(shape: ModelShape, ask: EstimateOptions) -> None:
    """Raise InvalidEstimate for a recipe that is not known for the model, or that has its own code."""
    if ask.recipe == "gpubroker":
        return
    if shape.head != "tokens" or shape.decoder_layers:
        raise InvalidEstimate(f"--recipe {ask.recipe}: known for decoder language models only; leave it out")
    if ask.transformers is not None and not KNOWN[ask.recipe].on_transformers:
        raise InvalidEstimate(f"--stack transformers={ask.transformers}: {ask.recipe} has its own models; leave it out")


def recompute(ask: EstimateOptions) -> Literal["early", "whole"]:
    """Return how checkpointed blocks are recomputed.

    `early` stops at the last saved tensor; `whole` recomputes all of the block, as the reentrant form does, which is
    the default of transformers 4. Raise InvalidEstimate for an invalid version.
    """
    return "whole" if is_version_4(_release(ask)) else "early"


def _release(ask: EstimateOptions) -> tuple[int, int] | None:
    """Return the release of `--stack`. Raise InvalidEstimate for an invalid version."""
    try:
        return release_of(ask.transformers)
    except ValueError as e:
        raise InvalidEstimate(f"--stack transformers={e}") from None


def _too_large(shape: ModelShape, ask: EstimateOptions, adapted: Collection[str]) -> Iterator[str]:
    """Yield a note if the rank exceeds the highest useful rank of the adapted matrices."""
    sides = {role: min(size) for role, size in linears(shape).items() if role in adapted}
    if sides and ask.method != "adapter" and ask.rank > (max_rank := max(sides.values())):
        wide = family_spec(shape).names[max(sides, key=sides.__getitem__)]
        limit = f"the widest adapted matrix, {wide}, has a rank of at most {max_rank}; a higher rank has no effect"
        yield f"--lora-r {ask.rank}: {limit}"


def numerics(shape: ModelShape, ask: EstimateOptions) -> tuple[Numerics, tuple[str, ...]]:
    """Return (types of weights and arithmetic, notes on the LoRA)."""
    full, single, release = ask.method == "full", ask.precision == "fp32", _release(ask)
    autocast = ask.precision.endswith("-autocast")
    adapted, notes = (frozenset[str](), ()) if full else adapted_modules(shape, ask.targets, ask.transformers)
    # FSDP's own mixed precision gathers half-precision weights
    sharded = ask.sharding in ("fsdp", "hybrid") and ask.gpus > 1
    trained = 4 if not full or autocast or single else 2
    weight_bits: Literal[0, 4, 8] = 4 if ask.method == "qlora" else 8 if ask.method == "lora8" else 0
    bits = weight_bits if is_quantised(shape.family, release) else 0
    attention = attention_of(shape.family, release, ask.attention)
    usual = Numerics(
        weight=4 if single or (full and autocast and not sharded) else 2,
        trained=trained,
        adapters=2 if sharded and autocast else 4,
        compute=4 if single else 2,
        full=full,
        autocast=autocast,
        bits=bits,
        norms_float32=weight_bits > 0 and autocast and not sharded and ask.norms == "float32",
        attention=attention,
        rank=1 if ask.method == "adapter" else ask.rank,
        dropout=ask.dropout > 0,
        experts_in_turn=is_version_4(release),
        repeated_keys=repeats_keys(shape.family, release, attention),
        presents=keeps_presents(shape.family, release, checkpointing=ask.checkpointing),
        adapted=adapted,
    )
    return typed(ask.recipe, usual, sharded=sharded), (*notes, *_too_large(shape, ask, adapted))


def _evidence(shape: ModelShape, ask: EstimateOptions) -> tuple[Tier, str, float]:
    """Return the evidence of `_evidence_read`, with more margin if this transformers version was never checked."""
    tier, words, margin = _evidence_read(shape, ask)
    if ask.recipe != "gpubroker" and tier != "unchecked":
        tier, words = "formula", f"{shape.family}: {evidence_words(ask.recipe)}"
        margin = max(margin, KNOWN[ask.recipe].margin)
    if is_checked(_release(ask)) or tier == "unchecked":
        return tier, words, margin
    return (
        tier if tier == "formula" else "traced",
        f"{words}; transformers {ask.transformers} was not checked: {CHECKED_MESSAGE}",
        margin + UNCHECKED_MARGIN,
    )


def _evidence_read(shape: ModelShape, ask: EstimateOptions) -> tuple[Tier, str, float]:
    tier, words, margin = evidence_of(shape, several=ask.gpus > 1)
    if tier == "unchecked":
        return tier, words, margin
    if (formula := _formula(shape, ask)) is not None:
        return "formula", *formula
    measured = _measured(shape.family, ask)
    return ("measured", *measured) if measured is not None else (tier, words, margin)


def _formula(shape: ModelShape, ask: EstimateOptions) -> tuple[str, float] | None:
    """Return (words, margin) of a step that was neither traced nor measured, or None."""
    family, sharded = shape.family, ask.gpus > 1 and ask.sharding in ("fsdp", "hybrid")
    if sharded and ask.method in ("qlora", "lora8") and ask.transformers is None:
        return f"{family}: {ask.method} under FSDP 2 by formula, neither traced nor measured", 0.25
    if ask.sharding in ("hybrid", "tensor") or ask.offload:
        return f"{family}: {ask.sharding}{' with offload' if ask.offload else ''} by formula, not measured", 0.15
    if ask.method == "adapter":
        return f"{family}: an adapter of unknown kind is estimated as a LoRA with its number of parameters", 0.25
    pair = shape.decoder_layers > 0  # its materialised attention was traced, but its quantised base was not
    untraced = ask.method == ("qlora" if pair else "lora8") or (ask.attention == "eager" and not pair)
    if untraced or ask.optimizer not in TRACED_OPTIMIZERS or ask.method == "lora8":
        return f"{family} with {ask.optimizer}, {ask.method}, {ask.attention}: not traced", FORMULA
    return None


def _measured(family: str, ask: EstimateOptions) -> tuple[str, float] | None:
    """Return (words, margin) if the options match the measured rows, which all use checkpointing; otherwise None."""
    half, several, stack = ask.precision in ("bf16", "fp16") or ask.method == "qlora", ask.gpus > 1, ask.transformers
    if not ask.checkpointing or not half or (several and (ask.sharding != "fsdp" or stack is None)):
        return None
    if family == "mixtral" and stack is not None:
        return "mixtral: within 0.9 % of ten peaks measured on A100, with experts in turn", 0.06
    if keeps_presents(family, _release(ask), checkpointing=True):
        return f"{family}: within 1.6 % of sixteen peaks measured on A100", 0.06
    if family not in MEASURED:
        return None
    if several:
        return f"{family} under FSDP 1: within 0.2 % of twenty peaks measured on two A100", 0.04
    return f"{family} on one GPU: within 0.1 % of eighteen peaks measured on an A100", 0.03


def by_formula(result: Estimate, words: str) -> Estimate:
    """Return the estimate for a task without any trace. `words`: the evidence."""
    if result.tier == "unchecked":
        return result
    margin = max(FORMULA, result.margin)
    added = margin - result.margin
    return replace(result, tier="formula", evidence=words, margin=margin, device_margin=result.device_margin + added)


def estimate(shape: ModelShape, ask: EstimateOptions) -> Estimate:
    """Return the peak of one device. Raise InvalidEstimate for options that make no sense."""
    if shape.pixels:  # an image has one token per patch, plus one
        ask = replace(ask, length=shape.max_positions or 1)
    check(shape, ask)
    ask, shape = replace(ask, transformers=recipe_version(ask.recipe, ask.transformers)), shaped(ask.recipe, shape)
    model_numerics, notes = numerics(shape, ask)
    step = _step(shape, ask, model_numerics)
    device_shape = shape
    if ask.sharding == "tensor":
        try:
            device_shape = divided(shape, ask.gpus // ask.nodes)
        except ValueError as e:
            raise InvalidEstimate(f"--sharding tensor: {e}") from None
    peak = simulate(device_shape, step)
    several = step.shards * step.replicas > 1
    workspace = device_overhead.CUBLAS_WORKSPACE if ask.transformers is None else device_overhead.STACK_WORKSPACE
    result = device_overhead.with_overhead(
        shape.parameters, peak, _evidence(shape, ask), notes, several=several, workspace=workspace
    )
    return replace(result, device_margin=result.device_margin + SHOWN_MORE.get(shape.family, 0.0))


def _step(shape: ModelShape, ask: EstimateOptions, model_numerics: Numerics) -> Step:
    """Return the options as a step for the simulator."""
    release = _release(ask)
    shards = {"fsdp": ask.gpus, "hybrid": ask.gpus // ask.nodes}.get(ask.sharding, 1)
    return Step(
        numerics=model_numerics,
        rows=ask.rows,
        length=ask.length,
        target=(ask.target or ask.length) if shape.decoder_layers else 0,
        checkpointing=ask.checkpointing,
        reentrant=is_version_4(release),  # the default of transformers 4, not the trainer's
        accumulated=ask.accumulated,
        optimizer=ask.optimizer,
        # as HF's Trainer configures bitsandbytes
        whole_states=embedded(shape) if model_numerics.full and ask.transformers is not None else 0,
        trained=ask.trainable,
        loss=loss_form(ask.recipe, loss_of(shape.family, release)),
        tables=table_bytes(shape, release, model_numerics.weight),
        shards=shards,
        replicas={"ddp": ask.gpus, "hybrid": ask.nodes, "tensor": ask.nodes}.get(ask.sharding, 1),
        masters=shards > 1 and model_numerics.full and model_numerics.trained > model_numerics.weight,
        fsdp=2 if ask.transformers is None else 1,
        offload=ask.offload and shards > 1,
    )

"""Seconds of one optimizer step on one device, as named terms.

The terms are arithmetic over the rate that matrix products or attention reach, bytes over bandwidth, and messages over
links. The counts follow from the model and the libraries' code. A few shares of the published rates are fitted
(`calibration`).
"""

from dataclasses import dataclass, replace
from math import log2
from typing import Literal

from broker.domain.workload import ModelShape
from broker.estimator.architecture.families import CROSS, PAIRS, Numerics, family_spec, layer_matrices, linears, stacks
from broker.estimator.speed.calibration import FITTED, Calibration
from broker.estimator.speed.hardware import Hardware
from broker.estimator.speed.memory_traffic import (
    LAST,
    LOGIT_BYTES,
    adapter_bytes,
    layer_bytes,
    optimizer_bytes,
    through,
    weight_bytes,
)

Recompute = Literal["none", "early", "whole"]
"""Part of a layer that checkpointing recomputes. `early` stops before the last linear module, as torch's non-reentrant
form does; `whole` is the reentrant form.
"""
ROW_BYTES = 24
"""Bytes per token from the host: ids, mask and labels of 8 bytes."""
HOST_LINK = 10e9
"""Bytes/s from host to device, pageable memory [assumed]."""
LAYER_LAUNCH_S = 0.9e-3
"""Seconds that a Python host needs to launch one pass of an eager layer, within a factor of two. The virtual machine of
an H100 took 1.7 ms (`benchmarks.gpu_exact`), and peft's runs on an L40S are consistent with 0.95.
"""
ADAPTER_LAUNCHES = 0.22
"""Share of a layer's launches that each adapter adds: that H100's 1.7 ms grew to 4.36 ms with seven adapters."""


@dataclass(frozen=True, kw_only=True)
class RooflineStep:
    """One step as the terms need it. `tokens`: of one micro-batch on one device; `length`: of one row."""

    shape: ModelShape
    numerics: Numerics
    tokens: float
    length: float
    trained: int
    """Weights that the optimizer holds states for."""
    target_tokens: float = 0.0
    """Tokens of one micro-batch that an encoder-decoder generates; `tokens` are those that it reads."""
    target_length: float = 0.0
    micro_batches: float = 1
    """Consecutive micro-batches of a step."""
    recompute: Recompute = "none"
    reference: int = 0
    """Forward passes without gradients that run first, by the model without its adapters (dpo: 1)."""
    optimizer: str = "adamw_fused"
    fused: bool = False
    """Norms, rotations and activations are one kernel each."""
    devices: int = 1
    nodes: int = 1
    """Machines that `devices` are on."""
    sharding: Literal["none", "ddp", "fsdp", "hybrid"] = "none"
    gathers: int = 2
    """Number of FSDP gathers of the weights per micro-batch; 1 if they stay after the forward pass."""
    reduced: int = 2
    """Bytes of each gradient that FSDP sends."""
    network: float = 0.0
    """Bytes/s into one machine; 0: the hardware's own rate."""


@dataclass(frozen=True, kw_only=True)
class Ideal:
    """Seconds of one step at all published rates.

    `within`, `between`: messages inside a machine and between machines. `launched`: time that a Python host needs to
    launch all kernels. `doublings`: base-2 logarithm of the number of devices.
    """

    hardware: str
    gpu: bool
    matmul: float
    attention: float
    modules: float
    """Traffic of a layer's eager modules, between its matrix products; 0 with fused kernels."""
    elementwise: float
    """All other traffic."""
    optimizer: float
    launched: float
    within: float
    between: float
    data: float
    doublings: float


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Seconds of one step. `within` and `between` overlap with each other and with the computation."""

    matmul: float
    attention: float
    elementwise: float
    optimizer: float
    host: float
    """Excess of the launch time over the computation."""
    within: float
    between: float
    exposed: float
    """Part of the messages that no computation hides."""
    data: float
    fixed: float
    """Waiting of the devices for each other, once a step."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        compute = self.matmul + self.attention + self.elementwise + self.host
        return compute + self.optimizer + self.exposed + self.data + self.fixed


def _stack_runs(run: RooflineStep) -> list[RooflineStep]:
    """Return one part for each stack of layers; the encoder of an encoder-decoder has no head."""
    if not run.shape.decoder_layers:
        return [run]
    encoder, decoder = stacks(run.shape)
    writing = replace(run, shape=decoder, tokens=run.target_tokens, length=run.target_length, target_tokens=run.tokens)
    return [replace(run, shape=replace(encoder, head="text")), replace(writing, target_length=run.length)]


def _share(run: RooflineStep, role: str) -> float:
    """Return how many tokens pass through the matrix of that role for each token of the layer.

    A decoder's cross attention computes keys and values from the tokens of the source.
    """
    cross = role in (f"{CROSS}k", f"{CROSS}v")
    return run.target_tokens / run.tokens if cross and run.tokens else through(run.shape, role)


def _pass_count(run: RooflineStep) -> int:
    """Return the number of passes of a layer; a backward pass counts as two."""
    return 3 + (run.recompute != "none") + run.reference


def _head(shape: ModelShape) -> tuple[int, int]:
    """Return (weights of the head, logits) per token. The class of a whole text is negligible per token."""
    match shape.head:
        case "tokens":
            return shape.hidden * shape.vocabulary, shape.vocabulary
        case "words":
            return shape.hidden * shape.labels, shape.labels
        case "image":  # the matrix of the patches, at the other end of the model
            return shape.hidden * shape.vocabulary, 0
    return 0, 0


def _products(run: RooflineStep) -> tuple[float, float]:
    """Return (FLOP, elements read and written) per token of all layers' matrix products, without LoRA's own."""
    # forward, backward to the input, and backward to the weights if they are trained
    trains = 3 if run.numerics.full else 2
    flop = elements = 0.0
    for role, (inputs, outputs) in linears(run.shape).items():
        is_recomputed = run.recompute == "whole" or (run.recompute == "early" and role not in LAST)
        products = (trains + is_recomputed + run.reference) * _share(run, role)
        flop += 2 * inputs * outputs * products
        elements += (inputs + outputs) * products
    return flop * run.shape.layers, elements * run.shape.layers


def _adapter_flop(run: RooflineStep) -> float:
    """Return the FLOP per token of the adapters.

    Each adapter is trained, so it has three products, and one more if checkpointing recomputes it.
    """
    role_shapes = linears(run.shape).items()
    widths = (sum(size) * through(run.shape, role) for role, size in role_shapes if role in run.numerics.adapted)
    return 2 * run.numerics.rank * sum(widths) * (_pass_count(run) - run.reference) * run.shape.layers


def _head_flop(run: RooflineStep) -> int:
    return 2 * _head(run.shape)[0] * ((3 if run.numerics.full else 2) + run.reference)


def _matmul(run: RooflineStep, hardware: Hardware) -> float:
    """Return the seconds of a token's products."""
    half = run.numerics.compute == 2
    rate = hardware.matmul_flops if half else hardware.fp32_flops
    adapters = rate if run.numerics.autocast else hardware.fp32_flops
    return (_products(run)[0] + _head_flop(run)) / rate + _adapter_flop(run) / adapters


def _scores(run: RooflineStep) -> float:
    """Return the FLOP of a token's attention in one pass. Causal attention is half of 4 q S."""
    shape = run.shape
    is_encoder_decoder, decoder = shape.family in PAIRS, shape.decoder_layers > 0
    attended = run.length * (1.0 if family_spec(shape).encoder or (is_encoder_decoder and not decoder) else 0.5)
    attended += run.target_length if decoder else 0.0  # all source tokens
    return 4 * attended * shape.layers * shape.heads * shape.head_dim


def _attention(run: RooflineStep, hardware: Hardware) -> float:
    # The backward pass of a fused attention costs 2.5 times its forward pass.
    flop = _scores(run) * (_pass_count(run) + 0.5)
    return flop / (hardware.attention_flops if run.numerics.compute == 2 else hardware.fp32_flops)


def _modules(run: RooflineStep) -> float:
    """Return the bytes of one micro-batch between the layers' matrix products."""
    bare = layer_bytes(run.shape, run.numerics, run.length, fused=run.fused)
    adapters = adapter_bytes(run.shape, run.numerics) * (_pass_count(run) - run.reference)
    return run.tokens * run.shape.layers * (bare * _pass_count(run) + adapters)


def _other_bytes(run: RooflineStep) -> float:
    """Return the bytes of one micro-batch into and out of matrix products, of logits and of weights."""
    products, passes = _products(run)[1] * run.numerics.compute, _pass_count(run)
    logits = _head(run.shape)[1] * LOGIT_BYTES * run.numerics.compute / 2 * (1 + run.reference / 3)
    weights = run.shape.layers * layer_matrices(run.shape)
    read = weight_bytes(run.numerics, passes if run.numerics.full else passes - 1)
    return run.tokens * (products + logits) + weights * read


def _messages(run: RooflineStep, hardware: Hardware) -> tuple[float, float]:
    """Return (seconds within a machine, seconds between machines) of one step."""
    gpus_per_node = -(-run.devices // run.nodes)
    bytes_per_weight = run.numerics.bits / 8 if run.numerics.bits else run.numerics.compute
    gathered = run.micro_batches * (run.shape.parameters * bytes_per_weight * run.gathers + run.trained * run.reduced)
    reduced = 2.0 * run.trained * run.numerics.trained
    inside = reduced if run.sharding == "ddp" else gathered
    outside = gathered if run.sharding == "fsdp" else reduced
    network = run.network or hardware.network
    return inside * (gpus_per_node - 1) / gpus_per_node / hardware.link, outside * (run.nodes - 1) / run.nodes / network


def model_flop(run: RooflineStep) -> float:
    """Return the FLOP of a token that is read or generated, without recomputation, as MFU counts it."""
    parts = _stack_runs(replace(run, recompute="none"))
    every = sum(part.tokens for part in parts)
    return sum(
        (_products(part)[0] + _adapter_flop(part) + _head_flop(part) + 3 * _scores(part)) * part.tokens / every
        for part in parts
    )


def ideal(run: RooflineStep, hardware: Hardware, *, cores: int = 1) -> Ideal:
    """Return the step at the published rates. `cores`: of a CPU; 1 for GPUs."""
    parts, layers = _stack_runs(run), run.shape.layers + run.shape.decoder_layers
    launches = run.micro_batches * layers * _pass_count(run) * (1 + ADAPTER_LAUNCHES * len(run.numerics.adapted))
    shards = {"fsdp": run.devices, "hybrid": -(-run.devices // run.nodes)}.get(run.sharding, 1)
    states = run.trained * optimizer_bytes(run.optimizer, run.numerics.trained) / shards
    within, between = _messages(run, hardware)
    micro_s = run.micro_batches / hardware.bandwidth / cores  # seconds for a byte of each micro-batch
    between_products = sum(map(_modules, parts)) * micro_s
    return Ideal(
        hardware=hardware.name,
        gpu=hardware.gpu,
        matmul=sum(_matmul(p, hardware) * p.tokens for p in parts) * run.micro_batches / cores,
        attention=sum(_attention(p, hardware) * p.tokens for p in parts) * run.micro_batches / cores,
        modules=0.0 if run.fused else between_products,
        elementwise=sum(map(_other_bytes, parts)) * micro_s + (between_products if run.fused else 0.0),
        optimizer=states / hardware.bandwidth / cores,
        launched=launches * LAYER_LAUNCH_S if hardware.gpu and not run.fused else 0.0,
        within=within,
        between=between,
        data=(run.tokens + run.target_tokens) * run.micro_batches * ROW_BYTES / HOST_LINK if hardware.gpu else 0.0,
        doublings=log2(run.devices),
    )


def terms(at_best: Ideal, by: Calibration = FITTED) -> Terms:
    """Return the terms of a step at the fitted shares of the published rates."""
    matmul, attention = by.shares(at_best.hardware) if at_best.gpu else (1.0, 1.0)
    bandwidth, modules = (by.bandwidth, by.modules) if at_best.gpu else (1.0, 1.0)
    work, scores = at_best.matmul / matmul, at_best.attention / attention
    moved = at_best.elementwise / bandwidth + at_best.modules / modules
    host = max(0.0, at_best.launched - work - scores - moved)
    within, between = at_best.within / by.within, at_best.between / by.between
    messages, hidden = max(within, between), by.hideable * (work + scores + moved + host)
    return Terms(
        matmul=work,
        attention=scores,
        elementwise=moved,
        optimizer=at_best.optimizer / bandwidth,
        host=host,
        within=within,
        between=between,
        exposed=max(by.exposed * messages, messages - hidden),
        data=at_best.data,
        fixed=by.sync_s * at_best.doublings,
    )

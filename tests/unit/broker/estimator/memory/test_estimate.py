"""Estimated memory of a fine-tune, and the evidence for it."""

from dataclasses import replace
from typing import Any

import pytest

from broker.domain.offer import GIB
from broker.domain.workload import ModelShape
from broker.estimator.memory.estimate import (
    OPTIMIZERS,
    EstimateOptions,
    InvalidEstimate,
    adapted_modules,
    by_formula,
    estimate,
)
from broker.estimator.memory.evidence import exact_margin
from tests.support.machines import LLAMA_3_8B, MISTRAL_7B

QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
A100 = EstimateOptions(
    method="lora", optimizer="adamw_foreach", precision="bf16", length=4096, rows=4, checkpointing=True, targets=QKVO,
    dropout=0.1, attention="flash", transformers="4.48.1",
)  # fmt: skip
QLORA_FSDP = {"method": "qlora", "precision": "bf16-autocast", "gpus": 2, "sharding": "fsdp"}
SMALL = replace(LLAMA_3_8B, hidden=256, intermediate=704, heads=8, kv_heads=2, head_dim=32, layers=5, vocabulary=1000)


def of(family: str, **changes: Any) -> ModelShape:
    return replace(SMALL, family=family, parameters=6_000_000, **changes)


@pytest.mark.parametrize(
    ("change", "measured"),
    [
        ({"method": "full", "precision": "bf16"}, 72_434_837_504),
        ({}, 26_704_571_904),
        ({"rows": 8}, 38_742_912_512),
        ({"method": "qlora"}, 16_373_838_336),
        ({"method": "qlora", "rows": 8}, 28_412_178_944),
        ({"method": "qlora", "precision": "bf16-autocast"}, 20_669_338_112),
        ({"method": "qlora", "precision": "bf16-autocast", "rows": 8}, 37_002_646_016),
        ({"method": "full", "gpus": 2, "sharding": "fsdp", "rows": 2}, 36_225_939_968),
        ({"gpus": 2, "sharding": "fsdp", "rows": 4}, 21_959_827_968),
        ({**QLORA_FSDP, "rows": 2}, 9_424_594_432),
        ({**QLORA_FSDP, "rows": 4}, 15_970_067_968),
    ],
)
def test_mistral_7b_agrees_with_a_measured_a100(change: dict[str, Any], measured: int) -> None:
    """fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv, commit 876e2ed, Apache-2.0: facts."""
    close = 0.01 if "gpus" in change else 0.002
    assert estimate(MISTRAL_7B, replace(A100, **change)).peak_allocated == pytest.approx(measured, rel=close)


def test_fsdp1_holds_inputs_and_gradients_of_frozen_layers() -> None:
    """FSDP 1's hooks hold the inputs; reentrant checkpointing makes leaves of them.

    FSDP 2, and trained layers, do without.
    """
    two = replace(A100, **QLORA_FSDP, rows=2)
    held = (
        estimate(MISTRAL_7B, two).peak_allocated
        - estimate(MISTRAL_7B, replace(two, transformers="5.0.0")).peak_allocated
    )
    layer = 2 * 2 * 4096 * 4096
    assert held > 15 * layer
    assert estimate(MISTRAL_7B, two).segment == "backward first layer"


@pytest.mark.parametrize(
    ("change", "tier", "margin"),
    [
        ({}, "measured", 0.03),
        ({"precision": "bf16-autocast"}, "traced", 0.05),
        ({"checkpointing": False}, "traced", 0.05),
        ({"method": "qlora", "precision": "bf16-autocast"}, "measured", 0.03),
        ({"optimizer": "adafactor"}, "formula", 0.10),
        ({"gpus": 2, "sharding": "ddp"}, "traced", 0.10),
        ({"gpus": 2, "sharding": "fsdp", "method": "qlora"}, "measured", 0.04),
        ({"gpus": 2, "sharding": "fsdp", "method": "qlora", "checkpointing": False}, "traced", 0.10),
        ({"gpus": 2, "sharding": "fsdp", "transformers": None}, "traced", 0.10),
        ({"gpus": 2, "sharding": "fsdp", "transformers": None, "method": "qlora"}, "formula", 0.25),
        ({"gpus": 4, "nodes": 2, "sharding": "hybrid", "transformers": None, "method": "lora8"}, "formula", 0.25),
    ],
)
def test_the_margin_follows_the_evidence(change: dict[str, Any], tier: str, margin: float) -> None:
    found = estimate(MISTRAL_7B, replace(A100, **change))
    assert (found.tier, found.margin) == (tier, margin)


def test_an_unknown_architecture_is_reported() -> None:
    found = estimate(of("mamba", known=False), EstimateOptions(length=128))
    assert (found.tier, found.margin) == ("unchecked", 1.4)
    assert "'mamba' is unknown" in found.evidence
    assert estimate(of("qwen2"), EstimateOptions(length=128)).tier == "traced"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"length": 0}, "--seq 0"),
        ({"rows": -1}, "--micro-batch -1"),
        ({"gpus": 0}, "--gpus 0"),
        ({"rows": 10**12}, "--micro-batch 1000000000000: must be at most 1000000"),
        ({"rank": 0}, "--lora-r 0"),
        ({"dropout": 1.0}, "--lora-dropout 1"),
        ({"length": 9000}, "8192 positions"),
        ({"method": "prompt"}, "--method prompt: not one of full"),
        ({"method": "adapter"}, "--trainable-parameters N goes with --method adapter"),
        ({"trainable": 5}, "--trainable-parameters N goes with --method adapter"),
        ({"method": "adapter", "trainable": 0}, "--trainable-parameters 0: must be from 1"),
        ({"gpus": 2}, "need ddp, fsdp"),
        ({"method": "qlora", "precision": "fp32"}, "half precision"),
        ({"nodes": 0}, "--nodes 0"),
        ({"gpus": 4, "nodes": 3, "sharding": "fsdp"}, "--gpus 4 cannot be divided"),
        ({"gpus": 4, "sharding": "hybrid"}, "needs several --nodes"),
        ({"gpus": 4, "nodes": 4, "sharding": "hybrid"}, "needs several --nodes"),
        ({"offload": True}, "--offload goes with"),
        ({"gpus": 3, "sharding": "tensor"}, "3 devices do not divide 32 heads"),
        ({"gpus": 16, "sharding": "tensor"}, "do not divide 8 heads of keys"),
        ({"gpus": 2, "sharding": "tensor", "method": "qlora"}, "tensor: not known for --method qlora"),
        ({"targets": ("wq", "wv")}, "wq,wv matches no module"),
        ({"targets": ()}, "(none) matches no module"),
        ({"transformers": "newest"}, "transformers=newest"),
    ],
)
def test_contradictory_options_are_refused_in_one_line(change: dict[str, Any], words: str) -> None:
    shape = replace(MISTRAL_7B, max_positions=8192)
    with pytest.raises(InvalidEstimate) as refused:
        estimate(shape, replace(A100, **change))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_targets_are_matched_as_peft_matches_them() -> None:
    """fms-acceleration asks for c_attn of a Mistral in addition to Mistral's own names; peft adapts existing ones."""
    found = estimate(MISTRAL_7B, replace(A100, targets=(*QKVO, "c_attn")))
    assert found.peak_allocated == estimate(MISTRAL_7B, A100).peak_allocated
    assert found.notes == ("LoRA target c_attn matches no module of mistral, and is ignored",)
    assert adapted_modules(of("gpt2"), ("c_proj",)) == (frozenset({"o", "proj"}), ())


def test_logits_cost_by_the_version() -> None:
    """A logit takes 14 bytes at the peak if logits are shifted, 12 if they were raised first or labels are padded."""

    def logits(version: str) -> int:
        return estimate(MISTRAL_7B, replace(A100, transformers=version)).by_category["logits"]

    one = 4 * 4096 * 32000
    assert logits("4.48.1") == pytest.approx(14 * one, rel=0.08)
    assert logits("4.48.1") - logits("4.45.2") == pytest.approx(2 * one, rel=0.01)


def test_device_use_is_the_peak_plus_context_and_fragments() -> None:
    found = estimate(MISTRAL_7B, A100)
    assert found.device_used == sum(found.by_category.values()) == found.peak_allocated + found.context
    assert found.device_used == pytest.approx(29_576 * 2**20, rel=0.05)


def test_foreach_copies_what_fused_does_not() -> None:
    work = replace(A100, method="full", rows=1, length=128)
    foreach, fused = estimate(MISTRAL_7B, work), estimate(MISTRAL_7B, replace(work, optimizer="adamw_fused"))
    assert foreach.by_category["temporary"] > 2 * MISTRAL_7B.parameters
    assert fused.peak_allocated < foreach.peak_allocated * 0.85


MIXTRAL = replace(MISTRAL_7B, family="mixtral", experts=8, active_experts=2, parameters=46_702_792_704, name="mixtral")


@pytest.mark.parametrize(
    ("change", "measured"),
    [
        ({"gpus": 2, "sharding": "fsdp", "rows": 2}, 54.200),
        ({"method": "qlora"}, 33.731),
        ({"method": "qlora", "rows": 8}, 43.966),
        ({**QLORA_FSDP}, 26.900),
    ],
)
def test_mixtral_agrees_with_a_measured_a100(change: dict[str, Any], measured: float) -> None:
    """GiB; fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv, commit 9239802, Apache-2.0: facts."""
    found = estimate(MIXTRAL, replace(A100, transformers="4.45.2", **change))
    assert found.peak_allocated / GIB == pytest.approx(measured, rel=0.04)
    assert (found.tier, found.margin) == ("measured", 0.06)


def test_fused_experts_get_no_adapter_and_run_at_once() -> None:
    new = replace(A100, transformers=None, targets=("all-linear",))
    old = replace(new, transformers="4.48.1")
    assert estimate(MIXTRAL, new).trainable == estimate(MIXTRAL, replace(new, targets=QKVO)).trainable
    assert estimate(MIXTRAL, old).trainable > 8 * estimate(MIXTRAL, new).trainable
    with pytest.raises(InvalidEstimate, match="w1 matches no module of mixtral"):
        estimate(MIXTRAL, replace(new, targets=("w1",)))
    at_once, in_turn = (
        estimate(MIXTRAL, replace(A100, transformers=v)).by_category["temporary"] for v in ("5.0.0", "4.48.1")
    )
    assert estimate(replace(MIXTRAL, family="qwen3_moe"), new).margin == 0.20
    assert at_once != in_turn


def test_each_optimizer_holds_its_own_states() -> None:
    def held(name: str) -> int:
        return estimate(MISTRAL_7B, replace(A100, method="full", optimizer=name)).by_category["optimizer"]

    p = MISTRAL_7B.parameters
    assert {n: round(held(n) / p, 2) for n in OPTIMIZERS} == {
        "adamw_fused": 4.0, "adamw_foreach": 4.0, "adamw_8bit": 2.14, "sgd": 0.0, "adafactor": 0.0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        (MISTRAL_7B, 32000), (replace(MISTRAL_7B, tied_embeddings=True), 32000),
        (replace(MISTRAL_7B, family="gpt2", max_positions=8192), 32000 + 8192),
        (replace(MISTRAL_7B, family="bert", head="text", labels=2, looked_up=(8192, 2)), 32000 + 8192 + 2),
        (replace(MISTRAL_7B, family="vit", head="image", labels=2), 0),
    ],
)  # fmt: skip
def test_under_hf_trainer_8_bits_leave_tables_in_float32(shape: ModelShape, rows: int) -> None:
    """transformers registers every nn.Embedding with bitsandbytes' GlobalOptimManager; gpubroker's own trainer does
    not.
    """
    ask = replace(A100, method="full", optimizer="adamw_8bit")
    stack, own = (estimate(shape, replace(ask, transformers=v)).by_category["optimizer"] for v in ("4.48.1", None))
    assert stack - own == pytest.approx(6 * rows * 4096, rel=0.01)
    lora = [estimate(MISTRAL_7B, replace(ask, method="lora", transformers=v)) for v in ("4.48.1", None)]
    assert lora[0].by_category["optimizer"] == lora[1].by_category["optimizer"]


def test_adafactor_works_on_one_matrix_at_a_time() -> None:
    full = replace(A100, method="full", optimizer="adafactor", rows=1, length=16)
    found = estimate(MISTRAL_7B, full)
    assert found.segment == "optimizer"
    assert found.by_category["temporary"] < 12 * 140_000_000
    lora = estimate(MISTRAL_7B, replace(full, method="lora"))
    assert lora.peak_allocated < found.peak_allocated


def test_an_adapter_of_another_kind_is_estimated_by_what_it_trains() -> None:
    """IA3, VeRA and the like: the base and its activations as under a LoRA, states for so many parameters."""
    small, large = (estimate(MISTRAL_7B, replace(A100, method="adapter", trainable=n)) for n in (10_000, 100_000_000))
    assert (small.tier, small.margin) == ("formula", 0.25)
    assert large.by_category["optimizer"] - small.by_category["optimizer"] == pytest.approx(8 * 1e8, rel=0.01)
    assert large.trainable == 100_000_000


def test_device_use_has_a_wider_margin_than_allocation() -> None:
    one, two = estimate(MISTRAL_7B, A100), estimate(MISTRAL_7B, replace(A100, gpus=2, sharding="fsdp"))
    assert one.margin < one.device_margin < two.device_margin


def test_a_rank_beyond_every_matrix_is_reported() -> None:
    most = estimate(MISTRAL_7B, replace(A100, rank=4096))
    more = estimate(MISTRAL_7B, replace(A100, rank=4097))
    assert most.notes == ()
    assert more.notes == (
        "--lora-r 4097: the widest adapted matrix, q_proj, has a rank of at most 4096; a higher rank has no effect",
    )
    assert estimate(MISTRAL_7B, replace(A100, method="full", rank=5000)).notes == ()
    assert estimate(MISTRAL_7B, replace(A100, method="adapter", trainable=9, rank=5000)).notes == ()


@pytest.mark.parametrize(
    ("family", "form", "margin"),
    [("llama", 0.05, 0.05), ("llama", 0.03, 0.03), ("new", 1.4, 0.10)],
)
def test_a_trace_of_the_models_own_code_is_as_near_as_such_were(family: str, form: float, margin: float) -> None:
    assert exact_margin(family, form) == margin


def test_an_untraced_task_is_estimated_by_a_formula_over_traced_ones() -> None:
    plain = estimate(MISTRAL_7B, A100)
    found = by_formula(plain, "two at once")
    assert (found.tier, found.margin, found.evidence) == ("formula", 0.10, "two at once")
    assert found.device_margin - plain.device_margin == pytest.approx(0.07)
    unknown = estimate(of("new"), A100)
    assert by_formula(unknown, "two at once") == unknown


def test_eight_bits_hold_half_of_sixteen() -> None:
    eight, sixteen = estimate(MISTRAL_7B, replace(A100, method="lora8")), estimate(MISTRAL_7B, A100)
    assert sixteen.by_category["weights"] - eight.by_category["weights"] == pytest.approx(6_979_321_856, rel=0.01)


def test_ddp_holds_buckets_and_fsdp_gathers() -> None:
    one = replace(A100, method="full", precision="bf16-autocast", rows=1)
    ddp = estimate(MISTRAL_7B, replace(one, gpus=2, sharding="ddp"))
    fsdp = estimate(MISTRAL_7B, replace(one, gpus=2, sharding="fsdp"))
    assert ddp.by_category["communication"] == 4 * MISTRAL_7B.parameters
    assert fsdp.by_category["weights"] == 2 * MISTRAL_7B.parameters
    assert fsdp.device_used < ddp.device_used / 1.9


def test_rows_longer_than_the_window_need_a_mask_and_keys_of_their_own() -> None:
    short, estimate_options = of("mistral", window=512), EstimateOptions(length=1024, rows=2, precision="bf16")
    masked, plain = estimate(short, estimate_options), estimate(replace(short, window=None), estimate_options)
    mask = 2 * 2 * 1024 * 1024
    assert masked.peak_allocated - plain.peak_allocated > short.layers * mask
    assert estimate(short, replace(estimate_options, attention="flash")).peak_allocated == plain.peak_allocated
    assert (
        estimate(short, replace(estimate_options, length=511)).peak_allocated
        < estimate(short, replace(estimate_options, length=512)).peak_allocated * 0.99
    )
    some = estimate(replace(short, windowed=(True, False, True, False, True)), estimate_options)
    assert plain.peak_allocated < some.peak_allocated < masked.peak_allocated
    every = replace(short, kv_heads=short.heads)
    assert (
        estimate(every, estimate_options).peak_allocated
        - estimate(replace(every, window=None), estimate_options).peak_allocated
        > 4 * mask
    )
    single = replace(estimate_options, precision="fp32")
    assert estimate(replace(short, family="gemma2"), single).peak_allocated > 0
    assert estimate(short, single).peak_allocated < estimate(replace(short, window=None), single).peak_allocated


def test_hybrid_sharding_divides_per_machine_and_offload_keeps_gathered() -> None:
    asked = replace(A100, method="full", precision="bf16-autocast", rows=1, transformers=None)
    eight = estimate(MISTRAL_7B, replace(asked, gpus=8, sharding="fsdp"))
    hybrid = estimate(MISTRAL_7B, replace(asked, gpus=16, nodes=2, sharding="hybrid"))
    far = estimate(MISTRAL_7B, replace(asked, gpus=16, nodes=2, sharding="fsdp"))
    off = estimate(MISTRAL_7B, replace(asked, gpus=8, sharding="fsdp", offload=True))
    assert hybrid.by_category == eight.by_category
    assert far.peak_allocated < eight.peak_allocated
    assert (off.by_category["weights"], off.by_category["optimizer"]) == (0, 0)
    assert (eight.margin, hybrid.margin, off.margin) == (0.10, 0.15, 0.15)


def test_tensor_parallel_devices_share_the_layers_and_each_have_all_logits() -> None:
    asked = replace(A100, method="full", precision="bf16-autocast", rows=1, transformers=None, checkpointing=False)
    one = estimate(MISTRAL_7B, asked)
    four = estimate(MISTRAL_7B, replace(asked, gpus=4, sharding="tensor"))
    layers = MISTRAL_7B.parameters - 2 * 32000 * 4096
    assert one.by_category["weights"] - four.by_category["weights"] == pytest.approx(4 * layers * 3 / 4, rel=0.001)
    twice = estimate(MISTRAL_7B, replace(asked, gpus=8, nodes=2, sharding="tensor"))
    assert twice.by_category["communication"] == four.by_category["weights"]


def test_a_step_is_estimated_in_bytes_not_gigabytes() -> None:
    assert estimate(LLAMA_3_8B, EstimateOptions()).peak_allocated > 10 * GIB

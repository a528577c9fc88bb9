"""GPUs are known by the names that nvidia-smi, sellers and users write."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from broker.cli.main import app
from broker.domain.gpu_names import gpu_name, marketed_gb
from broker.domain.spec import Resources
from broker.estimator.memory.estimate import EstimateOptions
from broker.estimator.speed.cards import CARDS, candidates
from broker.estimator.speed.hardware import TABLE, matches
from broker.sizing.estimate import EstimateError, estimate
from broker.sizing.what_if import what_if
from providers.common.gpu_names import accelerator

SPELT = {
    "NVIDIA A100-SXM4-80GB": "a100-80gb-sxm",
    "NVIDIA A100 80GB PCIe": "a100-80gb-pcie",
    "A100 80GB PCI-Express": "a100-80gb-pcie",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-PCIE-40GB": "a100-40gb-pcie",
    "A100-80G": "a100-80gb",
    "A100_80 GiB": "a100-80gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "H100 94GB": "h100-nvl",
    "H100-SXM5-80GB": "h100-sxm",
    "H100": "h100",
    "H100 80GB": "h100-80gb",
    "A100 SXM4": "a100-sxm",
    "A100": "a100",
    "A100 PCIe": "a100-pcie",
    "NVIDIA H200": "h200",
    "H200 SXM 141GB": "h200-sxm",
    "NVIDIA B200": "b200",
    "B200 SXM 192 GB": "b200",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "RTX4090": "rtx4090",
    "rtx_4090 24GB": "rtx4090",
    "4090": "rtx4090",
    "L40S 48GB": "l40s",
    "NVIDIA L40S PCIe": "l40s",
    "NVIDIA RTX A6000": "a6000",
    "RTXA6000": "a6000",
    "A10G": "a10g",
    "NVIDIA A10G Tensor Core GPU": "a10g",
    "NVIDIA L4": "l4",
}
OTHERS = {
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb": "h100-80gb-hbm3-mig-3gb-40gb",
    "NVIDIA GeForce RTX 4090 D": "geforce-rtx-4090-d",
    "NVIDIA GeForce RTX 4090 Laptop GPU": "geforce-rtx-4090-laptop-gpu",
    "NVIDIA GeForce RTX 3090 Ti": "geforce-rtx-3090-ti",
    "NVIDIA GeForce RTX 5090 Laptop GPU": "geforce-rtx-5090-laptop-gpu",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "rtx-pro-6000-blackwell-max-q-workstation-edition",
    "Quadro RTX 6000": "quadro-rtx-6000",
    "A10M": "a10m",
    "NVIDIA A10-24Q": "a10-24q",
    "NVIDIA A40-8C": "a40-8c",
    "L40G": "l40g",
    "Tesla V100S-PCIE-32GB": "tesla-v100s-pcie-32gb",
    "T4G": "t4g",
    "V100 24GB": "v100-24gb",
    "V100 16GB 32GB": "v100-16gb-32gb",
    "A100 96GB": "a100-96gb",
    "L40S SXM": "l40s-sxm",
    "A100 H100": "a100-h100",
    "NVIDIA": "nvidia",
}
"""Other products, and nonsense: none of them matches a GPU of the table."""


@pytest.mark.parametrize(("said", "name"), SPELT.items())
def test_spelling_variants_of_a_gpu_name_are_recognised(said: str, name: str) -> None:
    assert gpu_name(said) == name
    found = [name] if name in TABLE else [known for known in TABLE if matches(name, known)]
    assert found
    ran = CliRunner().invoke(app, ["estimate", "openai-community/gpt2", "--seq", "64", "--gpu", said, "--json"])
    document = json.loads(ran.stdout)
    assert document["gpu"] == found[0]
    said_so = [note for note in document["notes"] if note.startswith(f"--gpu {said}: assumed to be {found[0]} (")]
    assert bool(said_so) == (len({TABLE[known].memory_bytes for known in found}) > 1)
    sizes = {known: marketed_gb(known, TABLE[known].memory_bytes) for known in found}
    assert all(f"{known} ({size} GB)" in note for note in said_so for known, size in sizes.items())


@pytest.mark.parametrize(("said", "gpu"), [("H100", "h100-sxm"), ("A100", "a100-80gb-sxm"), ("a100-40gb", "a100-40gb")])
def test_an_ambiguous_gpu_name_means_the_usual_memory_size(said: str, gpu: str) -> None:
    document = estimate("openai-community/gpt2", seq=64, gpu=said)
    assert document["gpu"] == gpu
    assert any("assumed to be" in note for note in document["notes"]) == (said != "a100-40gb")


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("a100-sxm", {"a100-80gb-sxm", "a100-40gb"}),
        ("a100-40gb", {"a100-40gb", "a100-40gb-pcie"}),
        ("a100-pcie", {"a100-80gb-pcie", "a100-40gb-pcie"}),
        ("h100-80gb", {"h100-sxm", "h100-pcie"}),
        ("h100", {"h100-sxm", "h100-pcie", "h100-nvl"}),
    ],
)
def test_a_spec_that_leaves_something_open_means_all_of_that_name(said: str, meant: set[str]) -> None:
    assert {name for name in TABLE if matches(said, name)} == meant


@pytest.mark.parametrize(("said", "name"), OTHERS.items())
def test_another_product_is_not_taken_for_one_that_is_known(said: str, name: str) -> None:
    assert gpu_name(said) == name
    assert not any(matches(name, known) for known in TABLE)
    assert not candidates(said)
    estimated = estimate("openai-community/gpt2", seq=64, gpu=said)
    assert (estimated["gpu"], estimated["fits"], estimated["tokens_per_s"]) == (None, None, None)
    assert estimated["peak_allocated_bytes"] == estimate("openai-community/gpt2", seq=64)["peak_allocated_bytes"]
    assert estimated["tokens_per_s_basis"].startswith(f"--gpu {said}: not known")


ESTIMATED = {
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "3090": "rtx-3090",
    "RTX5090 32 GB": "rtx-5090",
    "A10 24GB": "a10",
    "NVIDIA A40": "a40",
    "NVIDIA L40": "l40",
    "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000",
    "Tesla T4": "t4",
    "V100": "v100-16gb",
    "Tesla V100-SXM2-32GB": "v100-32gb",
    "NVIDIA GH200 480GB": "gh200-96gb",
    "GH200_144GB": "gh200-144gb",
    "NVIDIA B300 SXM6 AC": "b300",
    "AMD Instinct MI300X": "mi300x",
}
"""Cards that an estimate knows, and for which no job is placed."""


@pytest.mark.parametrize(("said", "name"), ESTIMATED.items())
def test_a_card_that_no_job_uses_is_estimated_and_matches_no_offer(said: str, name: str) -> None:
    assert candidates(said)[0].name == name
    assert not any(matches(gpu_name(said), known) for known in TABLE)
    assert accelerator(said, None) not in TABLE
    assert accelerator(said, CARDS[name].memory_bytes) not in TABLE
    estimated = estimate("openai-community/gpt2", seq=64, gpu=said, precision="fp16-autocast")
    assert (estimated["gpu"], estimated["gpu_memory_bytes"], estimated["fits"]) == (
        name,
        CARDS[name].memory_bytes,
        True,
    )
    assert (estimated["tokens_per_s"] is None) == (name == "mi300x")
    assert any("assumed to be" in note for note in estimated["notes"]) == (said in ("V100", "NVIDIA GH200 480GB"))


def test_estimates_of_other_cards_are_kept_apart_from_the_table_of_offers() -> None:
    assert not set(CARDS) & set(TABLE)
    assert {h.name for h in CARDS.values()} == set(ESTIMATED.values())
    assert {name: marketed_gb(name, card.memory_bytes) for name, card in CARDS.items()} == {
        "rtx-3090": 24, "rtx-5090": 32, "a10": 24, "a40": 48, "l40": 48, "rtx-6000-ada": 48, "rtx-pro-6000": 96,
        "t4": 16, "v100-16gb": 16, "v100-32gb": 32, "gh200-96gb": 96, "gh200-144gb": 144, "b300": 288, "mi300x": 192,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "why"),
    [
        ("V100", "no basis: v100-16gb: computes in fp16, not in bf16; use the precision fp16-autocast"),
        ("MI300X", "no basis: mi300x: no run on such a GPU was measured, so only its memory is used"),
    ],
)
def test_a_card_without_a_speed_says_why_and_compares_memory(gpu: str, why: str) -> None:
    estimated = estimate("openai-community/gpt2", seq=64, gpu=gpu)
    assert (estimated["tokens_per_s"], estimated["tokens_per_s_basis"], estimated["fits"]) == (None, why, True)
    assert f"tokens/s: unknown: {why}" in str(estimated)
    with pytest.raises(EstimateError, match=f"--gpu {estimated['gpu']}: "):
        what_if("gpus=1", model="openai-community/gpt2", gpu=gpu, ask=EstimateOptions(length=64))


@pytest.mark.parametrize("name", TABLE)
def test_the_tables_own_names_stay(name: str) -> None:
    assert gpu_name(name) == name


@given(st.lists(st.sampled_from(["NVIDIA", "RTX", "A100", "8g", "8", "GB", "pci", "e", ".", "x", "-", "_", " "])))
@example(["8", ".", "GB"])
@example(["8", "NVIDIA", "GB"])
@example(["pci", "NVIDIA", "e"])
def test_canonical_names_are_stable(parts: list[str]) -> None:
    for joint in ("", " ", "-"):
        once = gpu_name(joint.join(parts))
        assert gpu_name(once) == once


def test_the_nearest_is_named_in_one_line() -> None:
    words = ["estimate", "openai-community/gpt2", "--seq", "64", "--gpu", "RTX\n4080"]
    ran = CliRunner().invoke(app, words)
    said = "--gpu RTX 4080: not known, the nearest is rtx4090; known are h100-sxm, "
    assert ran.exit_code == 0
    assert ran.stdout.splitlines()[-1].startswith(f"tokens/s: unknown: {said}")
    ran = CliRunner().invoke(app, [*words, "--what-if", "gpus=1"])
    assert (ran.exit_code, len(ran.stderr.splitlines())) == (2, 1)
    assert ran.stderr.startswith(f"error: {said}")


def test_a_spec_holds_the_tables_names() -> None:
    asked = Resources.model_validate({"accelerators": ["NVIDIA A100-SXM4-80GB", "RTX 4090", "h100"]})
    assert asked.accelerators == ("a100-80gb-sxm", "rtx4090", "h100")
    assert Resources.model_validate_json(asked.model_dump_json()) == asked
    for wrong in ("", "--", "x" * 101):
        with pytest.raises(ValidationError):
            Resources.model_validate({"accelerators": [wrong]})

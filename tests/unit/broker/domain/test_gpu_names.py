"""GPUs are known by the names that nvidia-smi, shops and people write."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from broker.cli.main import app
from broker.domain.gpu_names import gpu_name
from broker.domain.spec import Resources
from broker.estimator.speed.hardware import TABLE, matches
from broker.sizing.estimate import estimate

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
    "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada-generation",
    "NVIDIA GH200 480GB": "gh200-480gb",
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
    assert all(f"{known} ({TABLE[known].memory_bytes / 2**30:.0f} GiB)" in note for note in said_so for known in found)


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
    ran = CliRunner().invoke(app, ["estimate", "openai-community/gpt2", "--gpu", said])
    assert ran.exit_code == 2
    assert f"--gpu {said}: not known" in ran.stderr


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
    ran = CliRunner().invoke(app, ["estimate", "openai-community/gpt2", "--gpu", "RTX\n4080"])
    assert ran.exit_code == 2
    assert ran.stderr.startswith("error: --gpu RTX 4080: not known, the nearest is rtx4090; known are h100-sxm, ")
    assert len(ran.stderr.splitlines()) == 1


def test_a_spec_holds_the_tables_names() -> None:
    asked = Resources.model_validate({"accelerators": ["NVIDIA A100-SXM4-80GB", "RTX 4090", "h100"]})
    assert asked.accelerators == ("a100-80gb-sxm", "rtx4090", "h100")
    assert Resources.model_validate_json(asked.model_dump_json()) == asked
    for wrong in ("", "--", "x" * 101):
        with pytest.raises(ValidationError):
            Resources.model_validate({"accelerators": [wrong]})

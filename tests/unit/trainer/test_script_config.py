"""Settings of a script job: container images by their reference."""

import pytest
from pydantic import ValidationError

from trainer.contract.script import ScriptConfig


@pytest.mark.parametrize(
    "image",
    [
        "ubuntu", "ubuntu:22.04", "pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime", "localhost:5000/a/b_c__d:x",
        "ghcr.io/me/train@sha256:" + "0" * 64, "ghcr.io/me/train:1@sha256:" + "a" * 64,
    ],
)  # fmt: skip
def test_references_of_images_are_accepted(image: str) -> None:
    assert ScriptConfig(code="x", command=("a",), image=image).image == image


@pytest.mark.parametrize(
    "image",
    [
        "", "Ubuntu:22.04", "a b", "a;id", "$(id)", "-it", "a/../b", "a//b", "a@sha256:12", "a:", "a\n",
        "a" * 513, "--privileged", "a/b:-x",
    ],
)  # fmt: skip
def test_other_texts_are_refused_by_the_field(image: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ScriptConfig(code="x", command=("a",), image=image)
    assert refused.value.errors()[0]["loc"] == ("image",)

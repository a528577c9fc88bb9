"""Settings that transformers would not save."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.trainer import heads
from trainer import model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heads.llama(tmp_path_factory.mktemp("model"))


def test_contradicting_settings_for_generation_are_left_as_published(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    folder = shutil.copytree(llama, tmp_path / "base")
    published = {"do_sample": False, "temperature": 0.9, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(published))
    base = AutoModelForCausalLM.from_pretrained(folder)
    model.save_whole(tmp_path / "model", base)
    found = json.loads((tmp_path / "model/generation_config.json").read_text())
    assert (found["temperature"], found["eos_token_id"]) == (0.9, 2)
    assert base.generation_config.temperature == 0.9
    notices = [line for line in capsys.readouterr().out.splitlines() if line.startswith("notice:")]
    assert len(notices) == 1
    assert "`temperature`" in notices[0]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), base.parameters(), strict=True))

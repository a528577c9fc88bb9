"""A model's folder is data: no pickle of it is opened, and no code of it is run."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.trainer import heads
from trainer import model as models
from trainer import standalone
from trainer.blobs import Objects, connect
from trainer.contract.rendezvous import AttemptSpec, DataFile
from trainer.contract.train import TrainConfig
from trainer.faults import UserFault

CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class Own(LlamaForCausalLM):
    config_class = OwnConfig
"""


class Payload:
    """What a pickle does when it is opened."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heads.llama(tmp_path_factory.mktemp("models"))


def config(folder: Path) -> TrainConfig:
    return TrainConfig.model_validate({"model": str(folder), "data": {"path": "rows.csv", "completion": "{a}"}})


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_weights_that_are_a_pickle_are_never_opened(tiny: Path, tmp_path: Path) -> None:
    folder, marker = copied(tiny, tmp_path / "model"), tmp_path / "was-here"
    for path in folder.glob("*.safetensors"):
        path.unlink()
    planted = pickle.dumps(Payload(marker))
    for name in ("pytorch_model.bin", "model.safetensors.bin", "training_args.bin", "tokenizer.pkl"):
        (folder / name).write_bytes(planted)
    with pytest.raises(UserFault, match="cannot load"):
        models.load(config(folder), "fp32", "AutoModelForCausalLM")
    (folder / "model.safetensors").write_bytes(planted)
    with pytest.raises(Exception, match=r"(?i)header|safetensors|load"):
        models.load(config(folder), "fp32", "AutoModelForCausalLM")
    assert not marker.exists()
    pickle.loads(planted)
    assert marker.exists(), "the plant is alive"


@pytest.mark.parametrize("own", [True, False])
def test_code_that_a_model_brings_is_never_run_and_nobody_is_asked(own: bool, tiny: Path, tmp_path: Path) -> None:
    """Whether transformers knows the architecture otherwise, or not."""
    folder, marker = copied(tiny, tmp_path / "model"), tmp_path / "was-here"
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    said = json.loads((folder / "config.json").read_text())
    said["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    said["model_type"] = "own" if own else said["model_type"]
    (folder / "config.json").write_text(json.dumps(said))
    if own:
        with pytest.raises(UserFault, match=r"cannot load .*(trust_remote_code|custom code)"):
            models.load(config(folder), "fp32", "AutoModelForCausalLM")
    else:
        models.load(config(folder), "fp32", "AutoModelForCausalLM")
        models.tokenizer_of(config(folder))
    assert not marker.exists()


async def test_a_run_does_not_go_on_with_other_rows_than_it_began_with(tmp_path: Path) -> None:
    objects = Objects(connect(tmp_path.as_uri(), {}), "standalone")
    began, now = (DataFile(key="data/x", sha256=c * 64, bytes=1, format="csv") for c in "ab")
    spec = AttemptSpec(installation="i", job="j", attempt="a", number=1, data=began)
    await objects.write("attempts/a/spec.json", spec.model_dump_json().encode())
    await standalone._same_data(objects, "attempts/a/spec.json", began, "rows.csv")
    with pytest.raises(standalone.BadConfig, match=r"rows.csv has changed since this run began \(sha256 aaaaaaaaaaaa"):
        await standalone._same_data(objects, "attempts/a/spec.json", now, "rows.csv")

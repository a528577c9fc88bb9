"""A model's folder is data: no pickle of it is opened, and no code of it is run."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.conftest import rows
from tests.trainer.support import tiny_models as heads
from tests.trainer.support.harness import Bench, until
from trainer import preflight
from trainer.contract.documents import Manifest, Outcome
from trainer.contract.train import CheckpointConfig, TrainConfig
from trainer.core.errors import Fault, UserFault
from trainer.dataset.prompts import DataError
from trainer.models import base_identity as base_weights
from trainer.models import loading as models
from trainer.objectstore.objects import Objects, connect
from trainer.standalone import run as standalone

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
    """A pickle that creates the file `marker` when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heads.llama(tmp_path_factory.mktemp("models"))


def config(folder: Path | str, **more: Any) -> TrainConfig:
    return TrainConfig.model_validate({"model": str(folder), "data": {"path": "rows.csv", "completion": "{a}"}, **more})


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


def with_code(tiny: Path, to: Path, marker: Path, *, own: bool = True, module: str = "own", name: str = "Own") -> Path:
    """Return a model whose classes are its own. `own`: transformers does not know it otherwise."""
    folder = copied(tiny, to)
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    document = json.loads((folder / "config.json").read_text())
    document["auto_map"] = {"AutoConfig": f"{module}.OwnConfig", "AutoModelForCausalLM": f"{module}.{name}"}
    document["model_type"] = "own" if own else document["model_type"]
    (folder / "config.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize("own", [True, False])
def test_code_of_a_model_never_runs_and_never_prompts(own: bool, tiny: Path, tmp_path: Path) -> None:
    """The code does not run, for an architecture that transformers supports (`own` is False) and for one that it does
    not.
    """
    marker = tmp_path / "was-here"
    folder = with_code(tiny, tmp_path / "model", marker, own=own)
    if own:
        with pytest.raises(UserFault, match=r"it needs its own code; .* set train.trust_remote_code: true"):
            models.load(config(folder), "fp32", "AutoModelForCausalLM")
    else:
        models.load(config(folder), "fp32", "AutoModelForCausalLM")
        models.tokenizer_of(config(folder))
    assert not marker.exists()


# ----------------------------------------------------------------------------------------------------- allowed code


STEPS = 20


def job(bench: Bench, folder: Path) -> dict[str, Any]:
    train = config(
        folder,
        trust_remote_code=True,
        data={"path": "upload:x", "prompt": "{word} ", "completion": "{meaning}", "eval_share": 0.1},
        method={"kind": "full"},
        optim={"lr": 1e-3},
        max_steps=STEPS,
        global_batch=8,
        micro_batch=2,
    )
    return {"train": train, "data": bench.data(rows(), "csv"), "checkpoint": CheckpointConfig(every_s=1)}


HELD = """
import time
HOLD = Path({hold!r})
class Held(Own):
    seen = 0
    def forward(self, *args, **kwargs):
        if self.training and HOLD.exists():
            Held.seen += 1
            time.sleep(0.1)
        while Held.seen > 16 and HOLD.exists():
            time.sleep(0.01)
        return super().forward(*args, **kwargs)
"""
"""Worker that stops after four steps, of four micro-batches each, while a file exists. They last for 1.6 s at the
least, so that a save has begun by then, however slow the machine is; it is committed meanwhile."""


def test_code_that_is_allowed_trains_and_resumes_exactly(tiny: Path, tmp_path: Path) -> None:
    calm, rough = Bench(tmp_path / "calm"), Bench(tmp_path / "rough")
    for bench in (calm, rough):
        bench.env["HF_MODULES_CACHE"] = str(tmp_path / "modules")
    hold, marker = tmp_path / "hold", tmp_path / "was-here"
    folder = with_code(tiny, tmp_path / "model", marker, name="Held")
    with (folder / "own.py").open("a") as code:
        code.write(HELD.format(hold=str(hold)))
    try:
        assert calm.start(**job(calm, folder)).wait(600).outcome is Outcome.COMPLETED
        assert marker.exists()
        hold.touch()
        held = rough.start(**job(rough, folder))
        until(rough.committed, "a checkpoint", 600)
        held.kill_group()
        hold.unlink()
        again = rough.start(**job(rough, folder))
        assert again.wait(600).outcome is Outcome.COMPLETED, again.log
        assert again.final.resumed_from
        (one, whole), (other, resumed) = calm.committed()[0], rough.committed()[0]
        assert tensors(whole) == tensors(resumed)
        assert [r["loss"] for r in calm.metrics(one)] == [r["loss"] for r in rough.metrics(other)]
        assert "model/own.py" in {f.path for f in resumed.files}, "the result can be loaded as its base can"
        assert "| base model's own code | sha256:" in (rough.files(other) / "README.md").read_text()
    finally:
        calm.close()
        rough.close()


def tensors(manifest: Manifest) -> dict[str, str]:
    return {f.path: f.sha256 for f in manifest.files if f.path.endswith(".safetensors")}


def test_a_checkpoint_does_not_continue_with_other_code(tiny: Path, tmp_path: Path) -> None:
    folder = with_code(tiny, tmp_path / "model", tmp_path / "was-here")
    trusted = config(folder, trust_remote_code=True, method={"kind": "full"})
    before = base_weights.BaseIdentity(trusted).name()
    assert before
    assert base_weights.BaseIdentity(config(folder, method={"kind": "full"})).name() == ""
    base_weights.BaseIdentity(trusted).check(before)
    (folder / "own.py").write_text((folder / "own.py").read_text() + "# changed\n")
    with pytest.raises(Fault, match="belongs to other weights or code"):
        base_weights.BaseIdentity(trusted).check(before)


@pytest.mark.parametrize(
    "door", [preflight.main, lambda argv: standalone.main(Path(argv[0]), Path(argv[0] + "-out"), 60)]
)
def test_a_configuration_alone_allows_no_code(
    door: Any, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "was-here"
    folder = with_code(tiny, tmp_path / "model", marker)
    (tmp_path / "rows.csv").write_text("a\nw1 w2\nw3\n")
    path = tmp_path / "config.json"
    path.write_text(config(folder, trust_remote_code=True, global_batch=1).model_dump_json())
    assert door([str(path)]) == 64
    assert capsys.readouterr().err == (
        f"{path}: trust_remote_code: it runs the code of {str(folder)!r} on this machine; read it, then give "
        "--trust-remote-code too\n"
    )
    assert not marker.exists()
    assert preflight.main([str(path), "--trust-remote-code"]) == 0
    assert marker.exists()


def test_code_of_no_fixed_revision_is_refused(tiny: Path, tmp_path: Path) -> None:
    marker = tmp_path / "was-here"
    folder = with_code(tiny, tmp_path / "model", marker, module="owner/elsewhere--own")
    with pytest.raises(UserFault, match=r"config.json of .* takes code from 'owner/elsewhere', whose revision nothing"):
        models.load(config(folder, trust_remote_code=True), "fp32", "AutoModelForCausalLM")
    with pytest.raises(UserFault, match=r"train.revision: 'owner/name' brings code, .* give the commit"):
        models.tokenizer_of(config("owner/name", trust_remote_code=True, revision="main"))
    assert not marker.exists()


async def test_data_changing_during_its_upload_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data that changes while it is put into the store is refused by name."""
    rows = tmp_path / "rows.csv"
    rows.write_text("a\n1\n")
    objects = Objects(connect((tmp_path / "store").as_uri(), {}), "standalone")
    upload = objects.upload

    async def changed_before(key: str, path: Path) -> None:
        path.write_text("a\n2\n")
        await upload(key, path)

    monkeypatch.setattr(objects, "upload", changed_before)
    with pytest.raises(DataError, match=r"data.path: rows.csv was changed while it was read"):
        await standalone._put_data(objects, config("owner/name"), tmp_path, tmp_path, None)
    assert await objects.keys("") == []
    monkeypatch.undo()
    kept = await standalone._put_data(objects, config("owner/name"), tmp_path, tmp_path, None)
    assert await objects.read(kept.key) == b"a\n2\n"

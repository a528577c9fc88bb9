"""A fine-tune without a broker: it is told by the same keys as a job."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer import standalone
from trainer.contract.rendezvous import AttemptSpec, ExitCode
from trainer.contract.train import CheckpointConfig


def written(folder: Path, document: Any) -> Path:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def train(folder: Path) -> dict[str, Any]:
    (folder / "rows.csv").write_text("q,a\n1,2\n")
    data = {"path": "rows.csv", "prompt": "{q}", "completion": "{a}"}
    return {"model": str(folder / "absent"), "global_batch": 1, "max_length": 16, "data": data}


def test_a_spec_s_checkpoint_counts_and_the_option_before_it(tmp_path: Path) -> None:
    path = written(tmp_path, {"train": train(tmp_path), "checkpoint": {"every_s": 60, "keep": 3, "keep_every": 500}})
    assert standalone.read_saving(path, None) == CheckpointConfig(every_s=60, keep=3, keep_every=500)
    assert standalone.read_saving(path, 5) == CheckpointConfig(every_s=5, keep=3, keep_every=500)
    assert standalone.read_saving(written(tmp_path, train(tmp_path)), None) == CheckpointConfig()


@pytest.mark.parametrize(
    ("saving", "option", "why"),
    [
        ({"keep_every": 0}, None, r"^checkpoint\.keep_every: .*greater than or equal to 1"),
        ({"keep_evry": 1}, None, r"^checkpoint\.keep_evry: "),
        (7, None, "^checkpoint: "),
        ({}, 0.5, r"^--save-every.*greater than or equal to 1"),
    ],
)
def test_what_cannot_be_used_is_named(saving: Any, option: float | None, why: str, tmp_path: Path) -> None:
    path = written(tmp_path, {"train": train(tmp_path), "checkpoint": saving})
    with pytest.raises(standalone.BadConfig, match=why):
        standalone.read_saving(path, option)


def test_what_is_asked_for_reaches_the_agent(tmp_path: Path) -> None:
    path = written(tmp_path, {"train": train(tmp_path), "checkpoint": {"keep_every": 500}})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "work").touch()
    assert standalone.main(path, tmp_path / "out") == ExitCode.USER_ERROR, "a file lies where the agent works"
    (spec,) = (tmp_path / "out").glob("store/**/spec.json")
    assert AttemptSpec.model_validate_json(spec.read_bytes()).checkpoint == CheckpointConfig(keep_every=500)

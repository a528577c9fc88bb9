"""A job with unknown memory use tries its longest rows early, and the try does not change its weights."""

import contextlib
import json
from pathlib import Path

from tests.trainer.conftest import rows
from tests.trainer.support.workers import FORKS, Worker, _train, finished, story
from trainer.contract.data_config import DataConfig
from trainer.contract.train import FullConfig, TrainConfig

LOG = "said.txt"


def _heard(root: Path) -> None:
    with (root / LOG).open("w") as file, contextlib.redirect_stdout(file):
        _train(root)


def test_longest_rows_are_probed_after_step_one_without_effect(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    """The longest rows are tried after the first step and change nothing."""
    data = tmp_path / "rows.csv"
    data.write_bytes(rows())
    train = TrainConfig(
        model=str(tiny_models["full"]),
        data=DataConfig(path="rows.csv", prompt="{word} ", completion="{meaning}", eval_share=0.1),
        method=FullConfig(),
        max_steps=3,
        global_batch=8,
        micro_batch=4,
        max_length=32,
    )
    plain = finished(tmp_path / "plain", train, data)
    probing = Worker(tmp_path / "probing", train, data)
    document = json.loads(probing.run.job.read_text())
    probing.run.job.write_text(json.dumps({**document, "probe": True}))
    probing.process = FORKS.Process(target=_heard, args=(probing.run.root,))
    probing.process.start()
    probing.end()
    said = (probing.run.root / LOG).read_text().splitlines()
    (probe,) = [number for number, line in enumerate(said) if line.startswith("probe: 4 rows of up to 1")]
    steps = [number for number, line in enumerate(said) if line.startswith("step ")]
    assert steps[0] < probe < steps[1], said
    assert story(probing.last) == story(plain), "dropout and all"

"""A fine-tune without a broker is configured by the same keys as a job."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer import preflight
from trainer.contract.documents import AttemptSpec, DataFile, ExitCode
from trainer.contract.train import CheckpointConfig, TrainConfig
from trainer.core import config_file
from trainer.standalone import output_dir as output_folder
from trainer.standalone import resume_check as same_run
from trainer.standalone import run as standalone


def written(folder: Path, document: Any) -> Path:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def train(folder: Path) -> dict[str, Any]:
    (folder / "rows.csv").write_text("q,a\n1,2\n")
    data = {"path": "rows.csv", "prompt": "{q}", "completion": "{a}"}
    return {"model": str(folder / "absent"), "global_batch": 1, "max_length": 16, "data": data}


def test_the_option_overrides_the_specs_checkpoint_interval(tmp_path: Path) -> None:
    path = written(tmp_path, {"train": train(tmp_path), "checkpoint": {"every_s": 60, "keep": 3, "keep_every": 500}})
    assert config_file.read_saving(path, None) == CheckpointConfig(every_s=60, keep=3, keep_every=500)
    assert config_file.read_saving(path, 5) == CheckpointConfig(every_s=5, keep=3, keep_every=500)
    assert config_file.read_saving(written(tmp_path, train(tmp_path)), None) == CheckpointConfig()


def test_a_folder_of_a_model_is_relative_to_the_spec_as_the_data_is(tmp_path: Path) -> None:
    spec = tmp_path / "specs"
    for folder in (spec / "gpt2", tmp_path / "models/tiny"):
        folder.mkdir(parents=True)
    (tmp_path / "models/tiny/config.json").write_text("{}")
    pairs = {"../models/tiny": str(tmp_path / "models/tiny"), "owner/name": "owner/name", "gpt2": "gpt2"}
    for given, taken in (pairs | {"x" * 300: "x" * 300}).items():
        path = written(spec, train(tmp_path) | {"model": given})
        assert config_file.read_config(path).model == taken


@pytest.mark.parametrize(
    ("saving", "option", "why"),
    [
        ({"keep_every": 0}, None, r"^checkpoint\.keep_every: must be greater than or equal to 1, not 0$"),
        ({"keep_evry": 1}, None, r"^checkpoint\.keep_evry: unknown key; did you mean keep_every\?$"),
        (
            {"every_s": 0},
            None,
            r"^checkpoint\.every_s: must be greater than or equal to 1, not 0, or must be 'auto', not 0$",
        ),
        (7, None, "^checkpoint: must be an object"),
        ({}, 0.5, r"^--save-every: must be greater than or equal to 1, not 0.5"),
    ],
)
def test_unusable_checkpoint_settings_are_named(saving: Any, option: float | None, why: str, tmp_path: Path) -> None:
    path = written(tmp_path, {"train": train(tmp_path), "checkpoint": saving})
    with pytest.raises(config_file.BadConfig, match=why):
        config_file.read_saving(path, option)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epochs": True}, "epochs: must be a valid number, not true"),
        ({"micro_batch": "4"}, "micro_batch: must be a valid integer"),
        ({"optim": {"lr": 5}}, "optim.lr: must be less than or equal to 1, not 5, or must be 'auto', not 5"),
        (
            {"optim": {"name": "sgd"}},
            "optim: lr: no rate of sgd was published that goes for other models; give a number",
        ),
        ({"max_steps": 1, "maxsteps": 1}, "maxsteps: unknown key; did you mean max_steps?"),
        ({"method": {"r": 4}}, "method: kind is missing; add it"),
        ({"method": {"kind": "loar"}}, "method: kind must be one of 'lora', 'qlora', 'full', not 'loar'"),
        ({"task": "text_classification"}, "task text_classification needs data.prompt and data.label"),
        (
            {"task": "dpo", "method": {"kind": "full"}, "data": {"path": "a.csv", "chosen": "{a}", "rejected": "{q}"}},
            "method: dpo trains a LoRA, since the model under its adapters is the reference; use lora",
        ),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_in_plain_words(
    changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, train(tmp_path) | changes)
    assert standalone.main(path, tmp_path / "out") == ExitCode.USER_ERROR
    assert capsys.readouterr().err.startswith(f"{path}: {said}")
    assert not (tmp_path / "out").exists()


def test_a_missing_file_is_reported_as_by_the_preflight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, train(tmp_path))
    (tmp_path / "rows.csv").unlink()
    gone = f"data.path: no file {str(tmp_path / 'rows.csv')!r}; paths are relative to the spec"
    for spec, code, said in (
        (path, ExitCode.DATA, gone),
        (tmp_path, ExitCode.USER_ERROR, "cannot be read (Is a directory); name a job's spec or a TrainConfig"),
        (tmp_path / "x", ExitCode.USER_ERROR, "cannot be read (No such file or directory); name a job's spec"),
    ):
        (tmp_path / "absent").mkdir(exist_ok=True)
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (tmp_path / "absent" / name).write_text('{"model_type": "llama"}')
        assert standalone.main(spec, tmp_path / "out") == code
        assert capsys.readouterr().err.startswith(f"{spec}: {said}")
        assert preflight.main([str(spec)]) == code
        assert capsys.readouterr().err.startswith(f"{spec}: {said}")


def test_an_option_that_cannot_be_used_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, train(tmp_path))
    assert standalone.main(path, tmp_path / "out", mesh_sizes={"tensor": 0}) == ExitCode.USER_ERROR
    assert capsys.readouterr().err == "--tensor: must be greater than or equal to 1, not 0\n"


def test_the_checkpoint_settings_reach_the_agent(tmp_path: Path) -> None:
    path = written(tmp_path, {"train": train(tmp_path), "checkpoint": {"keep_every": 500}})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "work").touch()
    assert standalone.main(path, tmp_path / "out") == ExitCode.USER_ERROR, "a file lies where the agent works"
    (spec,) = (tmp_path / "out").glob("store/**/spec.json")
    assert AttemptSpec.model_validate_json(spec.read_bytes()).checkpoint == CheckpointConfig(keep_every=500)


def specs(output: Path) -> list[AttemptSpec]:
    return [AttemptSpec.model_validate_json(p.read_bytes()) for p in sorted(output.glob("store/**/spec.json"))]


def test_a_batch_that_is_left_open_is_settled_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {**train(tmp_path), "global_batch": "auto"}
    (tmp_path / "rows.csv").write_text("q,a\n" + "1,2\n" * 40)
    path, output = written(tmp_path, given), tmp_path / "out"
    output.mkdir()
    (output / "work").touch()
    assert standalone.main(path, output) == ExitCode.USER_ERROR, "a file lies where the agent works"
    assert "global_batch auto: 8 (Dettmers et al. 2023" in capsys.readouterr().out
    (first,) = specs(output)
    assert first.train is not None
    first_spec = next(output.glob("store/**/spec.json"))
    first_spec.write_text(
        first.model_copy(update={"train": first.train.model_copy(update={"global_batch": 4})}).model_dump_json()
    )
    assert standalone.main(path, output) == ExitCode.USER_ERROR
    assert "global_batch auto: 4, as before" in capsys.readouterr().out
    assert [s.train and s.train.global_batch for s in specs(output)] == [4, 4], "an earlier table's"
    (tmp_path / "rows.csv").write_text("q,a\n" + "1,2\n" * 3)
    standalone.main(path, output)
    assert [s.train and s.train.global_batch_rows for s in specs(output)] == [4, 4, 2], (
        "of other data, nothing being saved"
    )


@pytest.mark.parametrize("option", ["is_there", "below"])
def test_an_output_that_is_a_file_is_named(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, place = written(tmp_path, train(tmp_path)), tmp_path / "is_there"
    place.write_text("mine")
    output = place / "below" if option == "below" else place
    assert standalone.main(path, output) == ExitCode.USER_ERROR
    assert capsys.readouterr().err == f"--output {output} is a file, or lies below one; name a folder\n"
    assert place.read_text() == "mine"


def test_a_folder_takes_one_run_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second start is refused before it changes anything. After a kill the next start resumes."""
    path, output = written(tmp_path, train(tmp_path)), tmp_path / "out"
    script = "import sys; from pathlib import Path; from trainer.standalone.output_dir import holding\n"
    script += "with holding(Path(sys.argv[1])): print(flush=True); sys.stdin.read()"
    argv = [sys.executable, "-c", script, str(output)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        before = files(output)
        assert standalone.main(path, output) == ExitCode.USER_ERROR
        said = f"--output {output} is in use by another run (process {other.pid}): wait for its end, stop it, or name"
        assert capsys.readouterr().err == f"{said} another folder\n"
        assert files(output) == before
        other.kill()
    with output_folder.holding(output), pytest.raises(output_folder.BadOutput, match=f"process {os.getpid()}"):
        output_folder.holding(output).__enter__()
    (output / "work").touch()
    standalone.main(path, output)
    assert len(specs(output)) == 1


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


ROWS, OTHERS = (DataFile(key="data/x", sha256=c * 64, bytes=1, format="csv") for c in "ab")
BEGAN: dict[str, Any] = {
    "model": "owner/name", "global_batch": 4, "micro_batch": 4, "optim": {"lr": 1e-3},
    "data": {"path": "rows.csv", "prompt": "{q}", "completion": "{a}"},
}  # fmt: skip


LONG = "x" * 59


def compared(now: DataFile = ROWS, **changes: Any) -> str | None:
    train = TrainConfig.model_validate(BEGAN)
    began = AttemptSpec(installation="i", job="j", attempt="a", number=1, data=ROWS, train=train)
    return same_run.changed(began, now, TrainConfig.model_validate(BEGAN | changes))


def test_a_run_does_not_continue_with_other_rows_than_it_began_with() -> None:
    said = compared(OTHERS)
    assert said is not None
    assert said.startswith(
        f"data.path: rows.csv has changed since this run began (sha256 {'a' * 12}..., now {'b' * 12}"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 7}, "seed: this run began with 17, now it is 7;"),
        ({"method": {"kind": "lora", "r": 4}}, "method.r: this run began with 16, now it is 4;"),
        ({"method": {"kind": "full"}}, 'method.kind: this run began with "lora", now it is "full";'),
        ({"method": {"targets": ["q"], "kind": "lora"}}, 'method.targets: this run began with "all-linear", now it is'),
        ({"model": "owner/other"}, 'model: this run began with "owner/name", now it is "owner/other";'),
        ({"optim": {"lr": "auto"}}, 'optim.lr: this run began with 0.001, now it is "auto";'),
        ({"optim": {"lr": 1e-3, "name": "sgd"}}, 'optim.name: this run began with "adamw", now it is "sgd";'),
        ({"global_batch": 8}, "global_batch: this run began with 4, now it is 8;"),
        ({"samples": {"prompts": ["a"]}}, 'samples.prompts: this run began with [], now it is ["a"];'),
        ({"data": {**BEGAN["data"], "eval_share": 0.5}}, "data.eval_share: this run began with 0.05, now it is 0.5;"),
        (
            {"data": {**BEGAN["data"], "prompt": "x" * 99}},
            f'data.prompt: this run began with "{{q}}", now it is "{LONG}...',
        ),
        ({"task": "seq2seq"}, 'task: this run began with "causal_lm", now it is "seq2seq";'),
    ],
)
def test_settings_that_a_checkpoint_depends_on_may_not_change(changes: dict[str, Any], said: str) -> None:
    comparison = compared(**changes)
    assert comparison is not None
    assert comparison.startswith(said)
    assert comparison.endswith("; set it back, or give another --output")


def test_length_speed_and_destination_may_change() -> None:
    data = {**BEGAN["data"], "path": "moved.csv", "bad_share": 0.1}
    more: dict[str, Any] = {
        "epochs": 3,
        "max_steps": 9,
        "micro_batch": 2,
        "precision": "fp32",
        "tf32": True,
        "compile": True,
    }
    more |= {"attention": "eager", "eval_every_steps": 2, "guard": {"skip": 9}, "output": {"merge": True}, "data": data}
    assert compared(**more) is None
    assert compared(global_batch="auto") is None, "the number that was settled"


def test_checkpoints_of_earlier_starts_are_pruned_with_the_newest_ones(tmp_path: Path) -> None:
    path, output = written(tmp_path, train(tmp_path) | {"guard": {"rollbacks": 0}}), tmp_path / "out"
    output.mkdir()
    (output / "work").touch()
    store = output / "store/standalone"
    (tmp_path / "rows.csv").write_text("q,a\n3,4\n")
    standalone.main(path, output)
    (tmp_path / "rows.csv").write_text("q,a\n1,2\n")
    standalone.main(path, output)
    standalone.main(path, output)
    assert len(list((store / "data").iterdir())) == 1, "of rows that no checkpoint belongs to"
    for attempt, steps in (("0002", (5, 9, 12)), ("0003", (14,))):
        for step in steps:
            manifest = store / f"checkpoints/standalone/standalone-{attempt}/{step:010d}-ab/manifest.json"
            manifest.parent.mkdir(parents=True)
            manifest.touch()
    standalone.main(path, output)
    left = sorted(p.parent.name for p in store.glob("checkpoints/**/manifest.json"))
    assert left == ["0000000012-ab", "0000000014-ab"]
    assert [key.split("/")[3] for key in specs(output)[-1].resume_from] == ["0000000014-ab", "0000000012-ab"]


def test_another_configuration_is_refused_where_a_checkpoint_exists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refused start leaves no files."""
    path, output = written(tmp_path, train(tmp_path)), tmp_path / "out"
    output.mkdir()
    (output / "work").touch()
    standalone.main(path, output)
    standalone.main(written(tmp_path, {**train(tmp_path), "seed": 1}), output)
    assert [s.train and s.train.seed for s in specs(output)] == [17, 1], "nothing was saved, so nothing is gone on from"
    manifest = output / "store/standalone/checkpoints/standalone/standalone-0002/0000000005-ab/manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    before = files(output)
    capsys.readouterr()
    assert standalone.main(written(tmp_path, train(tmp_path)), output) == ExitCode.USER_ERROR
    said = f"{path}: seed: this run began with 1, now it is 17; set it back, or give another --output\n"
    assert capsys.readouterr().err == said
    (tmp_path / "rows.csv").write_text("q,a\n3,4\n")
    assert standalone.main(path, output) == ExitCode.USER_ERROR
    assert capsys.readouterr().err.startswith(f"{path}: data.path: rows.csv has changed since this run began")
    assert files(output) == before

"""Publishing by a standalone run, whose secrets are environment variables."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.grants.gate import gated
from tests.trainer.support import tiny_jobs
from tests.trainer.support.hub import TOKEN, Hub
from tests.trainer.support.tiny_jobs import KINDS
from tests.trainer.support.workers import HANGS_S
from trainer.contract.documents import ExitCode
from trainer.contract.output import OutputConfig
from trainer.contract.train import TrainConfig
from trainer.standalone import run as standalone

KIND = KINDS["causal_lm lora"]


def job(folder: Path, output: dict[str, Any]) -> Path:
    changes = {"max_steps": 2, "eval_every_steps": None, "output": OutputConfig.model_validate(output)}
    train = tiny_jobs.train(KIND, folder / "model").model_copy(update=changes)
    (folder / "rows.csv").write_bytes(tiny_jobs.data(KIND))
    path = folder / "job.json"
    path.write_text(train.model_dump_json(exclude_none=True))
    return path


def trained(path: Path, **variables: str) -> tuple[int, str]:
    """Return (exit code, output and logs)."""
    env = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"} | {"NO_PROXY": "127.0.0.1"} | variables
    argv = [sys.executable, "-m", "trainer", "--config", str(path), "--output", str(path.parent / "out")]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=HANGS_S)
    logs = "".join(p.read_text() for p in (path.parent / "out").glob("store/**/attempts/**/*") if p.is_file())
    return done.returncode, done.stdout + done.stderr + logs


async def test_results_are_pushed_and_copied_by_secrets_of_the_environment(tmp_path: Path, hub: Hub) -> None:
    async with gated() as gate:
        output = {"push": {"repo": "me/tuned", "secret": "HUB_TOKEN"}}
        output["copy_to"] = {"url": f"{gate.place}/done", "secret": "MY_S3"}
        path = job(tmp_path, output)
        values = {"HUB_TOKEN": TOKEN, "MY_S3": json.dumps(gate.options())}
        code, said = await asyncio.to_thread(trained, path, HF_ENDPOINT=hub.url, **values)
    assert code == ExitCode.COMPLETED, said
    assert "adapter_model.safetensors" in hub.files
    assert f"the results were copied to {gate.place}/done/standalone/" in said


def test_a_token_that_the_hub_refuses_is_in_no_log(tmp_path: Path, hub: Hub) -> None:
    path = job(tmp_path, {"push": {"repo": "me/tuned", "secret": "HUB_TOKEN"}})
    code, said = trained(path, HF_ENDPOINT=f"{hub.url}/hf_wrong_secret_value", HUB_TOKEN="hf_wrong_secret_value")
    assert code == ExitCode.COMPLETED, said
    assert "check the token in HUB_TOKEN" in said
    assert "[redacted HUB_TOKEN]" in said
    assert "hf_wrong_secret_value" not in said


@pytest.mark.parametrize(
    "output",
    [{"push": {"repo": "me/tuned", "secret": "MY_SECRET"}}, {"copy_to": {"url": "s3://a/b", "secret": "MY_SECRET"}}],
)
def test_a_secret_that_is_not_set_is_named_before_anything_is_trained(
    output: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MY_SECRET", raising=False)
    data = {"path": "rows.csv", "completion": "{a}"}
    path = tmp_path / "job.json"
    path.write_text(TrainConfig.model_validate({"model": "a/b", "data": data, "output": output}).model_dump_json())
    assert standalone.main(path, tmp_path / "out") == ExitCode.USER_ERROR
    said = "output: the environment variable MY_SECRET is not set; set it to the secret's value"
    assert capsys.readouterr().err == f"{path}: {said}\n"
    assert not (tmp_path / "out").exists()

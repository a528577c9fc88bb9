"""A training resumes only with the tokenizer and config that it began with, whose location may change."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.support import tiny_jobs, workers
from tests.trainer.support import tiny_models as heads
from tests.trainer.support.tiny_jobs import KINDS
from trainer.contract.checkpoint_format import ModelFingerprint
from trainer.contract.documents import ExitCode
from trainer.contract.train import TrainConfig
from trainer.core.errors import UserFault
from trainer.core.ipc import Ended
from trainer.models import identity as likeness
from trainer.models import loading as models

JOB = "job"


def permuted(folder: Path) -> Path:
    """Return its tokenizer with the same tokens under other numbers."""
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    words = document["model"]["vocab"]
    document["model"]["vocab"] = words | {"w3": words["w40"], "w40": words["w3"]}
    path.write_text(json.dumps(document))
    return folder


def configured(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def marked(folder: Path, template: str) -> Path:
    (folder / "chat_template.jinja").write_text(template)
    return folder


def like(folder: Path, job: str = JOB) -> tuple[TrainConfig, ModelFingerprint]:
    config = TrainConfig.model_validate({"model": str(folder), "data": {"path": "x.csv", "completion": "{a}"}})
    return config, likeness.fingerprint(config, models.tokenizer_of(config), job)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heads.llama(tmp_path_factory.mktemp("likeness"))


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model, tmp_path / "elsewhere")


def check(model: Path, now: Path, job: str = JOB) -> None:
    config, found = like(now, job)
    likeness.check(config, like(model)[1], found)


def test_a_model_that_was_moved_or_saved_again_is_the_same(model: Path, copy: Path) -> None:
    check(model, copy)
    check(model, configured(copy, transformers_version="9.0.0", dtype="bfloat16"))


def test_a_changed_tokenizer_is_named(model: Path, copy: Path) -> None:
    with pytest.raises(UserFault, match="has another tokenizer now"):
        check(model, permuted(copy))


def test_config_and_chat_template_may_not_change_within_a_job(model: Path, copy: Path) -> None:
    with pytest.raises(UserFault, match=r"another config\.json"):
        check(model, configured(copy, rms_norm_eps=0.1))
    shutil.copyfile(model / "config.json", copy / "config.json")
    with pytest.raises(UserFault, match="another chat template"):
        check(model, marked(copy, "{{ messages }}"))


def test_another_job_may_continue_with_chats_and_never_with_other_tokens(model: Path, copy: Path) -> None:
    check(model, marked(configured(copy, eos_token_id=3), "{{ messages }}"), "another")
    with pytest.raises(UserFault, match="another tokenizer"):
        check(model, permuted(copy), "another")


# ------------------------------------------------------------------------------------------------------ whole trainings


def gone_on(method: str, folder: Path, *, moved: bool = False, other: bool = False) -> Ended:
    """Train one step, resume and train a second one, and return how that ended. The model may have moved, or have
    another tokenizer."""
    kind, data = KINDS[f"causal_lm {method}"], folder / "rows.csv"
    data.write_bytes(tiny_jobs.data(kind))
    train = tiny_jobs.train(kind, folder / "model").model_copy(update={"max_steps": 1})
    restore = workers.finished(folder / "before", train, data)
    state = json.loads((restore / "state.json").read_text())
    assert state["fingerprint"]["tokens"]
    now = shutil.copytree(train.model, folder / "moved") if moved else Path(train.model)
    if other:
        permuted(now)
    then = train.model_copy(update={"max_steps": 2, "model": str(now)})
    return workers.Worker(folder / "then", then, data, restore=restore).start().end()


def test_full_weights_do_not_continue_with_another_models_tokens(tmp_path: Path) -> None:
    ended = gone_on("full", tmp_path, moved=True, other=True)
    assert (ended.code, "another tokenizer" in ended.message) == (ExitCode.USER_ERROR, True), ended.message


def test_adapters_do_not_resume_with_a_replaced_tokenizer(tmp_path: Path) -> None:
    ended = gone_on("lora", tmp_path, other=True)
    assert (ended.code, "another tokenizer" in ended.message) == (ExitCode.USER_ERROR, True), ended.message


def test_the_same_model_elsewhere_continues(tmp_path: Path) -> None:
    ended = gone_on("full", tmp_path, moved=True)
    assert ended.code == ExitCode.COMPLETED, ended.message

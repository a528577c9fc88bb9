"""Impossible samples, tokens without an embedding and contradictory generation settings: found before the first step,
or harmless at the end.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainer.batching.test_chats import TEMPLATE, turn
from tests.trainer.standalone.test_preflight import PLAIN, spec, told
from tests.trainer.support import tiny_jobs
from tests.trainer.support import tiny_models as heads
from trainer import tasks
from trainer.contract.train import SamplesConfig, TrainConfig
from trainer.core.errors import UserFault
from trainer.models import loading as model
from trainer.training.evaluator import Evaluator

ROWS = "word,meaning\nw1,w2\nw3,w4\n"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heads.llama(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("kind", "samples", "words"),
    [
        ("lora", {"prompts": ["w1", " "]}, "samples.prompts: the tokenizer makes no token of ' '"),
        (
            "full",
            {"prompts": ["w1 w2"], "max_new_tokens": 64},
            "'w1 w2' has 2 tokens, with max_new_tokens 64 more than",
        ),
        ("full", {"prompts": ["w1 w2"], "max_new_tokens": 63}, ""),
        ("lora", {"prompts": ["w1 w2"], "max_new_tokens": 1024}, ""),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused(
    kind: str, samples: dict[str, Any], words: str, tiny_models: dict[str, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = spec(tmp_path, ROWS, model=str(tiny_models[kind]), data=PLAIN, method={"kind": "full"}, samples=samples)
    code, _, err = told(path, capsys)
    assert code == (64 if words else 0)
    assert words in err


@pytest.mark.parametrize(("prompt", "most", "words"), [(" ", 4, "makes no token"), ("w1", 65, "64 positions")])
def test_an_encoder_decoder_is_asked_as_well(prompt: str, most: int, words: str, tmp_path: Path) -> None:
    kind = tiny_jobs.KINDS["seq2seq lora"]
    made = tiny_jobs.train(kind, tmp_path / "model")
    (tmp_path / "rows.csv").write_bytes(tiny_jobs.data(kind))
    train = made.model_copy(update={"samples": SamplesConfig(prompts=(prompt,), max_new_tokens=most)})
    tasks.build_task(made).examples(tmp_path / "rows.csv", "csv")
    with pytest.raises(UserFault, match=words):
        tasks.build_task(train).examples(tmp_path / "rows.csv", "csv")


def test_template_that_refuses_a_lone_turn_is_found_before_step_one(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples are asked as a single turn of the user."""
    folder = shutil.copytree(llama, tmp_path / "model")
    tokenizer = heads.tokenizer()
    lone = "{% if messages[0].role != 'system' %}{{ raise_exception('begin with system') }}{% endif %}"
    tokenizer.chat_template = lone + TEMPLATE
    tokenizer.save_pretrained(folder)
    text = json.dumps({"chat": [turn("system", "w9"), turn("user", "w1"), turn("assistant", "w2")]})
    train: dict[str, Any] = {"model": str(folder), "data": {"messages": "chat", "eval_share": 0}}
    assert told(spec(tmp_path, text, "chats.jsonl", **train), capsys)[0] == 0
    code, _, err = told(spec(tmp_path, text, "chats.jsonl", **train, samples={"prompts": ["w1"]}), capsys)
    assert (code, "refuses a chat of one user turn (begin with system); remove the prompts" in err) == (64, True)


def test_samples_that_fail_all_the_same_end_no_training() -> None:
    heard: list[str] = []

    def fails(*_: Any) -> Any:
        raise IndexError("index out of range\nmore")

    parts = {
        "job": SimpleNamespace(train=SimpleNamespace(samples=SamplesConfig(prompts=("a", "b")), quantised=None)),
        "task": SimpleNamespace(samples=SimpleNamespace(write=fails)), "accelerator": SimpleNamespace(device="cpu"),
        "model": torch.nn.Identity(),
        "report": SimpleNamespace(event=lambda kind, message: heard.append(f"{kind}: {message}")),
    }  # fmt: skip
    rest: Any = {"run": None, "parameters": {}, "held": (), "rows": 1}
    judge: Any = Evaluator(arrangement=SimpleNamespace(divided=False), **parts, **rest)  # type: ignore[arg-type]
    assert judge.generate_samples(alone=True) == ["", ""]
    assert heard == ["no_samples: the samples could not be written (IndexError: index out of range)"]
    judge = Evaluator(arrangement=SimpleNamespace(divided=True), **parts, **rest)  # type: ignore[arg-type]
    with pytest.raises(IndexError):
        judge.generate_samples(alone=False)


def test_only_tokens_used_by_the_rows_need_embeddings(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    tokenizer = heads.tokenizer()
    tokenizer.add_tokens(["new"])
    tokenizer.add_special_tokens({"pad_token": "<late>"})
    tokenizer.save_pretrained(folder)
    train: dict[str, Any] = {"model": str(folder), "data": PLAIN}
    assert told(spec(tmp_path, ROWS, **train), capsys)[0] == 0
    code, _, err = told(spec(tmp_path, ROWS + "w1,w2 new\n", **train), capsys)
    assert (code, err.count("\n")) == (64, 1)
    assert "row 3 of rows.csv has token 200 ('new'), and" in err
    assert "has 200 embeddings; resize them" in err
    code, _, err = told(spec(tmp_path, ROWS, **train, samples={"prompts": ["w1", "w3 new"]}), capsys)
    assert (code, err.count("\n")) == (64, 1)
    assert "samples.prompts: 'w3 new' has token 200 ('new'), and" in err
    task = tasks.build_task(TrainConfig.model_validate({**train, "data": {"path": "rows.csv", **PLAIN}}))
    (tmp_path / "rows.csv").write_text(ROWS)
    task.examples(tmp_path / "rows.csv", "csv")
    assert task.data.pad == tokenizer.eos_token_id, "the padding is not a token that the model lacks"


def test_contradicting_settings_for_generation_are_left_as_published(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    folder = shutil.copytree(llama, tmp_path / "base")
    published = {"do_sample": False, "temperature": 0.9, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(published))
    base = AutoModelForCausalLM.from_pretrained(folder)
    model.save_whole(tmp_path / "model", base)
    document = json.loads((tmp_path / "model/generation_config.json").read_text())
    assert (document["temperature"], document["eos_token_id"]) == (0.9, 2)
    assert base.generation_config.temperature == 0.9
    notices = [line for line in capsys.readouterr().out.splitlines() if line.startswith("notice:")]
    assert len(notices) == 1
    assert "`temperature`" in notices[0]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), base.parameters(), strict=True))

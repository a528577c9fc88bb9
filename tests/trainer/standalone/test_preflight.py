"""Faults that preflight reports before a GPU is bought, with the code that trains."""

import contextlib
import json
import shutil
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from tests.trainer.batching.test_chats import TEMPLATE, turn
from tests.trainer.support import digits
from tests.trainer.support import tiny_models as heads
from trainer import preflight, tasks
from trainer.contract.architectures import BIDIRECTIONAL
from trainer.contract.train import TrainConfig
from trainer.core.errors import Fault, UserFault
from trainer.dataset.prompts import DataError
from trainer.dataset.readers import each_row
from trainer.models import availability as reach


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files of a model that a check needs: config, tokenizer, and an empty file for the weights."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    made = heads.tokenizer()
    made.chat_template = TEMPLATE.replace(
        "{% for", "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% for", 1
    )
    made.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 16}))
    (folder / "model.safetensors").touch()
    return folder


def spec(folder: Path, text: bytes | str, name: str = "rows.csv", **changes: Any) -> Path:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    train: dict[str, Any] = {"global_batch": 1, "max_length": 16, **changes}
    train["data"] = {"path": name, **train["data"]}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({"name": "a", "cap_usd": 1, "train": train}))
    return path


def told(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], str]:
    code = preflight.main([str(path), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


PLAIN = {"prompt": "{word} ", "completion": "{meaning}", "eval_share": 0.25}


def test_rows_are_counted_as_they_will_be_trained(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["w1,w2 w3", "w1,w2 w3", "w4,", f"w5,{' '.join(f'w{n}' for n in range(30))}"]
    path = spec(tmp_path, "word,meaning\n" + "\n".join(rows), model=str(model), data=PLAIN)
    code, found, err = told(path, capsys)
    assert (code, err) == (0, "")
    assert (found["rows"], found["bad_rows"], found["empty_rows"], found["duplicates"]) == (4, 0, 1, 1)
    assert (found["train_rows"], found["heldout_rows"], found["steps"]) == (3, 1, 3)
    assert found["lengths"] == {"min": 2, "mean": 10.5, "p50": 4, "p90": 32, "p95": 32, "p99": 32, "max": 32}
    assert (found["truncated_rows"], found["truncated_share"], found["tokens_per_epoch"]) == (1, 0.25, 4 + 4 + 2 + 16)
    assert found["rendered"][0] == {"row": 1, "text": "w1 w2 w3 <eos>", "learned": "w2 w3 <eos>"}
    assert len(found["rendered"]) == 3
    assert preflight.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "25.0% of the rows are cut to 16" in out
    assert "1 rows repeat an earlier one" in out


def test_a_batch_that_is_left_open_is_reported_with_its_source(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "\n".join(f"w{n},w1" for n in range(22))
    path = spec(tmp_path, "word,meaning\n" + rows, model=str(model), data=PLAIN, global_batch="auto")
    code, found, _ = told(path, capsys)
    assert (code, found["train_rows"], found["steps"]) == (0, 16, 2)
    assert found["settled"].startswith("global_batch auto: 8 (Dettmers")
    assert preflight.main([str(path)]) == 0
    assert "settled    global_batch auto: 8 (Dettmers" in capsys.readouterr().out


def test_the_chat_template_is_rendered_and_its_refusal_names_the_row(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [turn("user", "w1"), turn("assistant", "w2")]
    lines = [{"chat": good}, {"chat": [turn("system", "w9"), *good]}, {"chat": "hello"}]
    text = "\n".join(map(json.dumps, lines))
    data = {"messages": "chat", "bad_share": 0.7, "eval_share": 0}
    code, found, _ = told(spec(tmp_path, text, "chats.jsonl", model=str(model), data=data), capsys)
    assert (code, found["rows"], found["bad_rows"]) == (0, 3, 2)
    assert found["bad"][0].startswith("chats.jsonl row 2: the model's chat template refuses the chat (no system role)")
    assert found["bad"][1].startswith("chats.jsonl row 3: column 'chat' is text and no JSON list")
    assert found["rendered"][0]["learned"] == "w2 <eos>"
    assert found["warnings"][0] == "2 bad rows are left out, as data.bad_share allows"


def test_bad_rows_of_every_kind_are_counted_and_the_data_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = b"t,mood\nw1,good\nw2,bad\nw\xff,bad\nw3,bad,more\nw4,ugly\nw5,\n"
    data = {"prompt": "{t}", "label": "mood", "labels": ["good", "bad"]}
    path = spec(tmp_path, rows, "moods.csv", model=str(model), task="text_classification", data=data)
    code, found, err = told(path, capsys)
    assert (code, found["code"], found["rows"], found["bad_rows"]) == (65, 65, 6, 4)
    assert found["labels"] == {"bad": 1, "good": 1}
    assert [fault.split(";")[0] for fault in found["bad"]] == [
        "moods.csv line 4: byte 0xff is not UTF-8",
        "moods.csv line 5: more cells than the header's 2",
        "moods.csv row 5: label 'ugly' is not among data.labels (good, bad)",
        "moods.csv row 6: column 'mood' is empty, or no plain text or number",
    ]
    assert "4 of 6 rows are bad, data.bad_share is 0" in err
    assert err.count("\n") == 1


def test_a_folder_of_pictures_is_checked_as_it_will_be_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vit = heads.vit(tmp_path / "vit")
    capsys.readouterr()  # a bar of the model's saving
    for name, content in digits.folders(12).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "digits/3/broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    (tmp_path / "digits/3/again.png").write_bytes((tmp_path / "digits/3/0003.png").read_bytes())
    data = {"path": "digits", "image": "image", "label": "label", "bad_share": 0.1, "eval_share": 0.25}
    path = tmp_path / "job.yaml"
    train = {"task": "image_classification", "model": str(vit), "data": data, "global_batch": 2}
    path.write_text(yaml.safe_dump({"name": "a", "cap_usd": 1, "train": train}))
    code, found, err = told(path, capsys)
    assert (code, err) == (0, "")
    assert (found["rows"], found["bad_rows"], found["duplicates"]) == (14, 1, 1)
    assert found["bad"][0].startswith("digits row 8 (3/broken.png): does not decode (not a known picture format")
    assert found["labels"] == {**dict.fromkeys(map(str, range(10)), 1), "0": 2, "1": 2, "3": 2}
    assert found["rendered"][0] == {"row": 1, "text": "0/0000.png: 8 x 8 pixels, as 8 x 8", "learned": "0"}
    assert found["lengths"] == {}
    assert preflight.main([str(path)]) == 0


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        (
            {"data": PLAIN | {"prompt": "{wrod}"}},
            65,
            "no column 'wrod' in the data; it has meaning, word; did you mean",
        ),
        ({"data": PLAIN, "max_length": 64, "packing": True}, 64, "rows reach 64 tokens"),
        ({"data": PLAIN, "global_batch": 9}, 64, "3 rows to train on are fewer than 9"),
        ({"data": PLAIN, "model": "./nowhere"}, 64, "no folder './nowhere' on this machine"),
        ({"data": PLAIN | {"path": "gone.csv"}}, 65, "data.path: no file"),
        ({"data": PLAIN | {"path": "socket.csv"}}, 65, "socket.csv cannot be read (No such device or address)"),
        ({"data": PLAIN | {"path": "upload:" + "0" * 64}}, 64, "an upload is the daemon's"),
    ],
)
def test_one_line_and_the_exit_code_say_whose_fault_it_is(
    changes: dict[str, Any], code: int, words: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "word,meaning\n" + "\n".join(f"w{n},w2" for n in range(4))
    with socket.socket(socket.AF_UNIX) as unreadable, contextlib.chdir(tmp_path):
        unreadable.bind("socket.csv")
    found, report, err = told(spec(tmp_path, text, **({"model": str(model)} | changes)), capsys)
    assert (found, err.count("\n")) == (code, 1)
    assert words in err
    assert report["problem"] in err


class _Hub(BaseHTTPRequestHandler):
    """Emulated Hub API of one gated model, as far as the check uses it."""

    def do_GET(self) -> None:
        allowed = self.headers.get("Authorization") == "Bearer good"
        if self.path == "/api/models/meta/gated":
            self._answer(200, {"id": "meta/gated", "gated": "manual", "siblings": [{"rfilename": "a.safetensors"}]})
        elif self.path == "/api/models/meta/gated/auth-check":
            self._answer(200 if allowed else 403, {}, "GatedRepo")
        else:
            self._answer(404, {}, "RepoNotFound")

    def _answer(self, status: int, body: dict[str, Any], code: str = "") -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        if status != 200:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield url
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_gated_model_is_asked_for_with_the_token_and_names_its_licence(
    hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "bad")
    with pytest.raises(UserFault, match=f"gated and the token has no access; accept its licence at {hub}/"):
        reach.check_model_available("meta/gated")
    monkeypatch.setenv("HF_TOKEN", "good")
    assert reach.check_model_available("meta/gated") == f"{hub}/meta/gated, gated, and this token may read it"
    with pytest.raises(UserFault, match="the Hub has no 'meta/none' for this token"):
        reach.check_model_available("meta/none")


def test_a_hub_that_is_silent_is_not_the_jobs_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(Fault, match="about 'a/b'") as caught:
        reach.check_model_available("a/b")
    assert caught.value.code == 75


@pytest.mark.parametrize(
    ("data", "fmt", "places"),
    [
        (b'a,b\n1,2\n"x"y,2\n3,4\n', "csv", ["data line 3: "]),
        (b'{"a": 1}\n{"a": "\xe9"}\n[1]\n{"a": 2}', "jsonl", ["data line 2: byte 0xe9", "data line 3: is not an obj"]),
        (b'[{"a": "\xe9"}, 7, {"a": 1}]', "json", ["data row 1: byte 0xe9", "data row 2: is not an object"]),
    ],
)
def test_a_bad_row_does_not_hide_those_after_it(data: bytes, fmt: Any, places: list[str]) -> None:
    found = list(each_row(data, fmt))
    faults = [str(row) for row in found if isinstance(row, DataError)]
    assert len(faults) == len(places)
    assert all(fault.startswith(place) for fault, place in zip(faults, places, strict=True))
    assert isinstance(found[-1], dict)


def test_a_file_with_a_broken_csv_structure_is_refused_as_a_whole() -> None:
    with pytest.raises(DataError, match="UTF-16"):
        list(each_row("a,b\n1,2\n".encode("utf-16"), "csv"))
    with pytest.raises(DataError, match=r"^data line 2: a cell continues to line 3: unexpected end of data"):
        list(each_row(b'a,b\n1,"2\n3,4\n', "csv"))
    with pytest.raises(DataError, match=r"^data line 4: a cell continues to line 6: ',' expected after"):
        list(each_row(b'a,b\n1,2\n\n3,"4\n5,6\n7,"8\n9,0\n', "csv"))
    with pytest.raises(DataError, match=r"^data line 2: field larger than field limit"):
        list(each_row(b'a,b\n1,"' + b"x" * 1_000_001 + b'"\n3,4\n', "csv"))


@pytest.mark.parametrize("key", ["global_batch", "model"])
def test_a_key_that_is_given_twice_is_refused_by_its_line(
    key: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = spec(tmp_path, "word,meaning\nw1,w2\n", model=str(model), data=PLAIN)
    text = path.read_text().rstrip("\n") + f"\n  {key}: again\n"
    path.write_text(text)
    code, found, err = told(path, capsys)
    assert (code, found["rows"]) == (64, 0)
    assert err == f"{path}: line {text.count(chr(10))}: train.{key}: the key is given twice; keep one\n"


@pytest.mark.parametrize(
    ("kind", "attention", "code"),
    [("ctrl", "sdpa", 0), ("gemma2", "eager", 0), ("gemma2", "sdpa", 64), ("cpmant", "flash", 64)],
)
def test_a_kernel_that_the_model_lacks_is_refused_by_name(
    kind: str, attention: str, code: int, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    train: dict[str, Any] = {"model": str(folder), "attention": attention, "method": {"kind": "full"}, "data": PLAIN}
    found, _, err = told(spec(tmp_path, "word,meaning\nw1,w2\nw3,w4\n", **train), capsys)
    assert found == code
    if code:
        wrong = f"train.attention: {str(folder)!r} ({kind}) has no {attention} kernel; use auto\n"
        assert err == f"{tmp_path / 'job.yaml'}: {wrong}"


def test_equal_pairs_and_labels_without_classes_are_reported(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "word,meaning\nw1,w2\nw3,w3\nw4,w5\nw6,w6\n"
    code, found, _ = told(spec(tmp_path, rows, model=str(model), task="reward_model", data=PAIRS), capsys)
    assert (code, found["equal_pairs"]) == (0, 2)
    assert "2 rows have equal answers, chosen and rejected: nothing is learned from them" in found["warnings"]
    strange = "column 'meaning' has a different label in each of 4 rows; check that it holds classes"
    train: dict[str, Any] = {"model": str(model), "task": "text_classification", "data": CLASSES}
    rows = rows.replace("w6,w6", "w6,w7")
    assert strange in told(spec(tmp_path, rows, **train), capsys)[1]["warnings"]
    assert strange not in told(spec(tmp_path, rows.replace("w6,w7", "w6,w2"), **train), capsys)[1]["warnings"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.csv", b"word,meaning\n", "has a header or an empty list but no row; give at least one row"),
        ("rows.json", b"[]", "has a header or an empty list but no row; give at least one row"),
        (
            "rows.parquet",
            b"PAR1" + b"torn" * 40 + b"\x10\0\0\0PAR1",
            "is not a Parquet file that can be read; write it again",
        ),
    ],
)
def test_a_file_without_rows_gives_exactly_one_line(
    name: str, content: bytes, said: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rust writes to the standard error itself."""
    path = spec(tmp_path, content, name, model=str(model), data=PLAIN)
    capfd.readouterr()
    assert preflight.main([str(path)]) == 65
    assert capfd.readouterr().err == f"{path}: {name}: {said}\n"


TEXTS = {"path": "rows.csv", "prompt": "{word} ", "completion": "{meaning}", "eval_share": 0.25}
PAIRS = {"path": "rows.csv", "chosen": "{word}", "rejected": "{meaning}", "eval_share": 0.25}
CLASSES = {"path": "rows.csv", "prompt": "{word}", "label": "meaning", "eval_share": 0.25}
DECODER = "a decoder, such as llama or gpt2"


@pytest.mark.parametrize(
    ("task", "data", "config", "words"),
    [
        (
            "causal_lm",
            TEXTS,
            {"model_type": "bert"},
            f"bert and sees what it is to predict; task causal_lm takes {DECODER}",
        ),
        ("causal_lm", TEXTS, {"model_type": "gemma2", "use_bidirectional_attention": True}, "gemma2 and sees what"),
        ("causal_lm", TEXTS, {"model_type": "xlnet"}, "xlnet and sees what it is to predict"),
        ("dpo", PAIRS, {"model_type": "roberta"}, f"roberta and sees what it is to predict; task dpo takes {DECODER}"),
        ("causal_lm", TEXTS, {"model_type": "t5"}, "t5; task causal_lm takes no encoder-decoder, seq2seq does"),
        ("causal_lm", TEXTS, {"model_type": "vit"}, f"vit; task causal_lm takes {DECODER}"),
        ("seq2seq", TEXTS, {"model_type": "llama"}, "llama; task seq2seq takes an encoder-decoder, such as t5 or bart"),
        ("seq2seq", TEXTS, {"model_type": "bert"}, "bert; task seq2seq takes an encoder-decoder, such as t5 or bart"),
        ("text_classification", CLASSES, {"model_type": "vit"}, "vit; task text_classification takes a model of texts"),
        ("text_classification", CLASSES, {"model_type": "bart"}, "bart; task text_classification takes no encoder-dec"),
        ("reward_model", PAIRS, {"model_type": "vit"}, "vit; task reward_model takes a model of texts"),
    ],
)
def test_model_of_another_kind_is_refused_by_every_method(
    task: str, data: dict[str, Any], config: dict[str, Any], words: str, model: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The message is that of the trainer."""
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(config))
    for method in ("lora",) if task == "dpo" else ("lora", "full"):
        train: dict[str, Any] = {"task": task, "model": str(folder), "method": {"kind": method}, "data": data}
        path = spec(tmp_path, "word,meaning\nw1,w2\nw3,w4\n", **train)
        code, _, err = told(path, capsys)
        assert code == 64
        assert err.startswith(f"{path}: train.model: {str(folder)!r} is of the kind {words}"), err
        trained = tasks.build_task(TrainConfig.model_validate({"max_length": 16, **train}))
        with pytest.raises(UserFault) as caught:
            trained.examples(tmp_path / "rows.csv", "csv")
        assert f"{path}: {caught.value}\n" == err


def test_an_encoder_that_was_made_a_decoder_is_taken(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    for config in ({"model_type": "bert", "is_decoder": True}, {"model_type": "xlnet", "attn_type": "uni"}):
        (folder / "config.json").write_text(json.dumps(config))
        train: dict[str, Any] = {"model": str(folder), "method": {"kind": "full"}, "data": TEXTS}
        assert told(spec(tmp_path, "word,meaning\nw1,w2\nw3,w4\n", **train), capsys)[0] == 0


def test_all_kinds_that_read_both_ways_are_known() -> None:
    """transformers has them for masked words; a newer version may have more."""
    from transformers.models.auto import modeling_auto

    masked = set(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    pairs = set(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    assert masked - pairs <= BIDIRECTIONAL


@pytest.mark.parametrize(
    ("prompt", "warned"), [("{word}", True), ("{word} ", False), ("{word}:", False), ("{word}字", False)]
)
def test_a_completion_that_continues_a_word_of_the_prompt_is_reported(
    prompt: str, warned: bool, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"prompt": prompt, "completion": "{meaning}", "eval_share": 0}
    path = spec(tmp_path, "word,meaning\nw1,w2 w3\nw4,w5\n", model=str(model), data=data)
    _, found, _ = told(path, capsys)
    lines = [line for line in found["warnings"] if "prompt and completion meet within a word" in line]
    assert bool(lines) is warned

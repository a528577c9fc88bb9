"""An unreadable model counts as the user's fault only if neither the Hub nor this machine failed."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import transformers

from trainer.contract.documents import ExitCode
from trainer.contract.train import TrainConfig
from trainer.core.errors import Fault
from trainer.models import loading as models
from trainer.models import remote_code
from trainer.tasks.image import diffusers_io

COMMIT = "a" * 40
Serve = Callable[[int, str], None]


def config(model: str = "own/name", **more: Any) -> TrainConfig:
    return TrainConfig.model_validate({"model": model, "data": {"path": "rows.csv", "completion": "{a}"}, **more})


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Return a function that makes the Hub answer every request with a status and an error code."""
    servers: list[ThreadingHTTPServer] = []

    def start(status: int, code: str = "") -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = b'{"id": "own/name", "siblings": [{"rfilename": "a.safetensors"}]}' if status == 200 else b"{}"
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("X-Error-Code", code)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        at(f"http://127.0.0.1:{servers[-1].server_port}")

    def at(url: str) -> None:
        monkeypatch.setenv("HF_ENDPOINT", url)

    at("http://127.0.0.1:9")  # refused, until there is one
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def fails_with(error: Exception) -> Callable[..., Any]:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    return fails


def wrapped() -> OSError:
    """Return a failure as transformers wraps it: every failure is an OSError without a number."""
    error = OSError("We couldn't connect to the Hub to load the files")
    error.__cause__ = huggingface_hub.errors.LocalEntryNotFoundError("it cannot be located")
    return error


def loading(read: str, error: Exception, patch: pytest.MonkeyPatch) -> Fault:
    """Return the fault that each function that reads a model raises for an error."""
    patch.setattr(transformers.AutoConfig, "from_pretrained", fails_with(error))
    patch.setattr(transformers.AutoTokenizer, "from_pretrained", fails_with(error))
    patch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fails_with(error))
    patch.setattr(huggingface_hub, "hf_hub_download", fails_with(error))
    code = config(trust_remote_code=True, revision=COMMIT)
    reads: dict[str, Callable[[], Any]] = {
        "config": lambda: models.config_of(config()),
        "tokenizer": lambda: models.tokenizer_of(config()),
        "weights": lambda: models.load(config(), "fp32", "AutoModelForCausalLM"),
        "code": lambda: remote_code.load_options(code),
        "diffusion": lambda: diffusers_io.pipeline_kind(config()),
    }
    with pytest.raises(Fault) as caught:
        reads[read]()
    return caught.value


READS = ("config", "tokenizer", "weights", "code", "diffusion")


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("status", [503, None])
def test_a_hub_that_is_away_is_not_the_jobs_fault(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, status: int | None, read: str
) -> None:
    if status:
        serve(status, "")
    fault = loading(read, wrapped(), monkeypatch)
    assert fault.code == ExitCode.INFRASTRUCTURE
    assert "no usable answer" in str(fault) or "cannot be asked" in str(fault)


@pytest.mark.parametrize("read", READS)
def test_a_model_that_the_hub_has_not_is_the_users_fault(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    serve(404, "RepoNotFound")
    fault = loading(read, OSError("own/name is not a valid model identifier"), monkeypatch)
    assert fault.code == ExitCode.USER_ERROR
    assert "the Hub has no 'own/name'" in str(fault)


@pytest.mark.parametrize("read", READS)
def test_a_hub_that_has_recovered_still_caused_the_failure(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    serve(200, "")
    assert loading(read, wrapped(), monkeypatch).code == ExitCode.INFRASTRUCTURE
    assert loading(read, ValueError("unknown architecture"), monkeypatch).code == ExitCode.USER_ERROR
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert loading(read, wrapped(), monkeypatch).code == ExitCode.USER_ERROR


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ESTALE])
@pytest.mark.parametrize("folder", [True, False])
def test_a_machine_that_fails_is_not_the_users_fault(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, folder: bool
) -> None:
    serve(200, "")
    error = OSError("Can't load the configuration")
    error.__context__ = OSError(number, os.strerror(number))
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", fails_with(error))
    with pytest.raises(Fault, match=os.strerror(number)) as caught:
        models.config_of(config(str(tmp_path)) if folder else config())
    assert caught.value.code == ExitCode.INFRASTRUCTURE


def test_a_folder_that_is_not_whole_is_the_users_fault(serve: Serve, tmp_path: Path) -> None:
    with pytest.raises(Fault, match="cannot load") as caught:
        models.config_of(config(str(tmp_path)))
    assert caught.value.code == ExitCode.USER_ERROR

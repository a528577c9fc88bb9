"""A quote must not tell which folders the daemon's host has."""

import asyncio
import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from broker.domain.errors import InvalidInput
from broker.preflight import model_lookup
from broker.preflight.model_folders import ModelFolders
from broker.preflight.model_lookup import find, is_folder
from broker.runtime.cpu_threads import CpuThreads
from trainer.contract.train import TrainConfig

T = TypeVar("T")


def train(model: str) -> TrainConfig:
    return TrainConfig.model_validate({"model": model, "data": {"path": "a.csv", "completion": "{x}"}})


async def refusal(folders: ModelFolders, model: str) -> str:
    with pytest.raises(InvalidInput) as caught:
        await folders.permit(train(model))
    return caught.value.problems[0].message.replace(model, "X")


async def found(folders: ModelFolders, path: Path) -> None:
    """Look up the model in a folder, as a quote does."""
    await find((await folders.permit(train(str(path)))).model, hub=None)


async def shared() -> bool:
    return True


async def test_several_users_without_roots_get_one_answer(tmp_path: Path) -> None:
    folders = ModelFolders(is_shared=shared)
    answers = {await refusal(folders, m) for m in (str(tmp_path), "/nonexistent", "~root", "~nobody-here", "./x")}
    assert len(answers) == 1
    assert "model_roots" in answers.pop()


async def test_outside_of_roots_and_absent_get_one_answer(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "good").mkdir()
    (root / "good" / "config.json").write_text(json.dumps({}))
    (root / "alias").symlink_to(root / "good")
    (root / "leak").mkdir()
    (root / "leak" / "config.json").symlink_to(tmp_path / "secret.json")
    folders = ModelFolders(roots=(root,))
    bad = ("link", "absent", "../outside", "good/../../outside")
    assert len({await refusal(folders, f"{root}/{name}") for name in bad}) == 1
    assert "links" in await refusal(folders, f"{root}/leak")
    assert (await folders.permit(train(f"{root}/alias"))).model == str(root / "good")


async def test_files_closed_to_others_are_not_read_for_tenants(tmp_path: Path) -> None:
    """Jobs of other users cannot read such a file, and its owner did not mean to share it."""
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text("{}")
    (model / "config.json").chmod(0o600)
    folders = ModelFolders(roots=(tmp_path,), is_shared=shared)
    answer = await refusal(folders, str(model))
    assert "config.json" in answer
    assert "\n" not in answer
    assert (await ModelFolders(roots=(tmp_path,)).permit(train(str(model)))).model == str(model)
    (model / "config.json").chmod(0o644)
    assert (await folders.permit(train(str(model)))).model == str(model)


@pytest.mark.parametrize(("owner", "call"), [(Path, "iterdir"), (model_lookup, "_without_waiting"), (Path, "glob")])
async def test_an_unreadable_folder_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, call: str
) -> None:
    """Root reads every file, so the error of another user is raised in its place."""
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(owner, call, denied)
    with pytest.raises(InvalidInput) as caught:
        await found(ModelFolders(roots=(tmp_path,)), tmp_path)
    [problem] = caught.value.problems
    assert (problem.field, "cannot be read: Permission denied;" in problem.message) == ("train.model", True)


async def test_unreachable_folders_are_refused_unread() -> None:
    folders = ModelFolders(reachable=False)
    assert await refusal(folders, "/root") == await refusal(folders, "/nonexistent")


async def test_single_user_names_any_folder_and_hub_ids_pass(tmp_path: Path) -> None:
    assert (await ModelFolders().permit(train(str(tmp_path)))).model == str(tmp_path)
    assert (await ModelFolders(reachable=False).permit(train("owner/name"))).model == "owner/name"


def test_hub_id_never_probes_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "etc" / "ssl").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_folder("etc/ssl")


async def test_a_folder_is_read_by_threads_and_a_pipe_holds_none(tmp_path: Path) -> None:
    """The read of a FIFO held the event loop of the daemon forever."""
    os.mkfifo(tmp_path / "config.json")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer.json").touch()
    threads = CpuThreads()
    folders, run = ModelFolders(roots=(tmp_path,)), threads.of_team("red")
    loop_thread, used = threading.get_ident(), set[int]()

    async def recorded(compute: Callable[[], T]) -> T:
        def in_thread() -> T:
            used.add(threading.get_ident())
            return compute()

        return await run(in_thread)

    async with asyncio.timeout(60):
        permitted = await folders.permit(train(str(tmp_path)), recorded)
        with pytest.raises(InvalidInput, match="is not a file"):
            await find(permitted.model, hub=None, run=recorded)
    assert used
    assert loop_thread not in used

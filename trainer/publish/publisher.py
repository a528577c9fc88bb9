"""Publishing of results: `python -m trainer.publish FOLDER --config SPEC`, and at the end of a job.

FOLDER holds a job's results as `gpubroker artifacts` fetches them. Each secret is read from the environment variable of
its name.
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError

from trainer.contract.output import CopyConfig, OutputConfig, PushConfig
from trainer.core import disk_space
from trainer.objectstore.objects import ObjectStoreError, connect

ROOTS = ("model", "adapter")
"""Folders of weights; the first that exists becomes the repository's root."""
FOLDERS = (*ROOTS, "samples", "tensorboard")
TOP_LEVEL_FILES = ("README.md", "eval.json", "samples.json", "metrics.jsonl")
"""Result files outside of `FOLDERS`."""


class NotPublished(Exception):
    """Results were not published; the message is one line with place, problem and fix."""


def push(folder: Path, config: PushConfig, token: str, endpoint: str | None) -> str:
    """Push all results in one commit, and return the commit's URL. Raises: NotPublished."""
    from huggingface_hub import CommitOperationAdd, HfApi

    files = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in _layout(folder).items()]
    api = HfApi(endpoint=endpoint, token=token)
    try:
        api.create_repo(config.repo, private=config.private, exist_ok=True)
        if config.private and not api.repo_info(config.repo).private:  # an existing repository keeps its visibility
            raise NotPublished(f"output.push: {config.repo} is public; make it private, or set private to false")
        commit = api.create_commit(config.repo, files, commit_message="Fine-tuned with gpubroker")
    except NotPublished:
        raise
    except Exception as e:  # raised by huggingface_hub or the client below it, which differs between releases
        raise NotPublished(
            f"output.push: {config.repo} ({type(e).__name__}: {_line(e)}); check the token in {config.secret}"
        ) from None
    return str(commit.commit_url)


def _layout(folder: Path) -> dict[str, Path]:
    """Return the files by their path in the repository. Raises: NotPublished."""
    root = next((name for name in ROOTS if (folder / name).is_dir()), None)
    if root is None:
        raise NotPublished(f"{folder}: neither model/ nor adapter/ is there; give the folder of a job's results")
    layout = {name: folder / name for name in TOP_LEVEL_FILES if (folder / name).is_file()}
    for top in FOLDERS:
        for path in sorted(p for p in (folder / top).rglob("*") if p.is_file()):
            inner = path.relative_to(folder / top).as_posix()
            layout[inner if top == root else f"{top}/{inner}"] = path
    return layout


def _results(folder: Path) -> list[str]:
    """Return the paths of the results, relative to the folder. Raises: NotPublished if there are none.

    The checkpoint store that a standalone run has in the same folder is left out.
    """
    inside = [path for top in FOLDERS for path in (folder / top).rglob("*") if path.is_file()]
    names = [*(path.relative_to(folder).as_posix() for path in inside), *TOP_LEVEL_FILES]
    if not inside:
        raise NotPublished(f"{folder}: none of {', '.join(FOLDERS)} is there; give the folder of a job's results")
    return sorted(name for name in names if (folder / name).is_file())


async def copy(folder: Path, config: CopyConfig, job: str, credentials: str) -> str:
    """Copy every result to `<url>/<job>/`, and return this URL. Raises: NotPublished."""
    try:
        options = json.loads(credentials or "{}")
        if not isinstance(options, dict):
            raise ValueError
    except ValueError:
        problem = f"secret {config.secret} is not a JSON object of the store's options"
        raise NotPublished(f"output.copy_to: {problem}") from None
    names = _results(folder)
    try:
        store = connect(config.url, {str(k): str(v) for k, v in options.items()})
        for name in names:
            await obstore.put_async(store, f"{job}/{name}", folder / name)
    except (ObjectStoreError, BaseError, OSError) as e:
        if disk_space.is_full(e) and config.url.startswith("file://"):
            disk_message = disk_space.disk_full_message(
                Path(unquote(urlsplit(config.url).path)), disk_space.tree_bytes(folder)
            )
            raise NotPublished(f"output.copy_to: {config.url} is full: {disk_message}") from None
        raise NotPublished(f"output.copy_to: {config.url} ({_line(e)}); check the secret {config.secret}") from None
    return f"{config.url.rstrip('/')}/{job}/"


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


async def publish(
    folder: Path, output: OutputConfig, *, job: str, secrets: Mapping[str, str], endpoint: str | None
) -> tuple[list[str], list[str]]:
    """Return (what was published, what was not and why); each destination is independent of the others."""
    delivered: list[str] = []
    failed: list[str] = []
    try:
        if output.push:
            token = secrets.get(output.push.secret, "")
            where = await asyncio.to_thread(push, folder, output.push, token, endpoint)
            delivered.append(f"the results were pushed to {where}")
    except NotPublished as e:
        failed.append(str(e))
    try:
        if output.copy_to:
            where = await copy(folder, output.copy_to, job, secrets.get(output.copy_to.secret or "", ""))
            delivered.append(f"the results were copied to {where}")
    except NotPublished as e:
        failed.append(str(e))
    return delivered, failed

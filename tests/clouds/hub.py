"""A Hugging Face hub on loopback: serves folders with models to `huggingface_hub` and transformers (HF_ENDPOINT)."""

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from aiohttp import web

REVISION = "main"


class Hub:
    """Emulated Hub: `async with Hub({"owner/name": folder}) as hub:` serves it at `hub.url`."""

    def __init__(self, models: Mapping[str, Path], *, port: int = 0) -> None:
        self._models = dict(models)
        self.port = port
        self._digests: dict[tuple[Path, int, int], str] = {}
        self._runner: web.AppRunner | None = None
        self.url = ""
        self.requests: list[str] = []
        """Method and path of every request."""

    async def __aenter__(self) -> "Hub":
        app = web.Application()
        model = "/api/models/{owner}/{name}"
        app.add_routes(
            [
                web.get(model, self._info), web.get(model + "/revision/{revision}", self._info),
                web.get(model + "/tree/{revision}", self._tree),
                web.get(model + "/tree/{revision}/{path:.+}", self._tree),
                web.post(model + "/paths-info/{revision}", self._paths),
                web.get("/{owner}/{name}/resolve/{revision}/{path:.+}", self._file),
                web.route("*", "/{path:.*}", self._nothing),
            ]
        )  # fmt: skip
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    # ------------------------------------------------------------------------------------------------------- answers

    async def _info(self, request: web.Request) -> web.Response:
        model, folder = self._found(request)
        commit = self._commit(folder)
        siblings = [
            {"rfilename": _path(folder, file), "size": file.stat().st_size, "blobId": commit} for file in _files(folder)
        ]
        return web.json_response(
            {
                "_id": commit[:24], "id": model, "modelId": model, "author": model.split("/")[0], "sha": commit,
                "private": False, "gated": False, "disabled": False, "tags": [], "downloads": 0, "likes": 0,
                "createdAt": "2025-01-01T00:00:00.000Z", "lastModified": "2025-01-01T00:00:00.000Z",
                "pipeline_tag": "text-generation", "library_name": "transformers", "siblings": siblings,
            }
        )  # fmt: skip

    async def _tree(self, request: web.Request) -> web.Response:
        _, folder = self._found(request)
        top = folder / request.match_info.get("path", "")
        if not (top.is_dir() and top.resolve().is_relative_to(folder.resolve())):
            raise _not_found("EntryNotFound", f"{top.name} is not a folder of the model")
        return web.json_response([await self._entry(folder, file) for file in _files(top)])

    async def _paths(self, request: web.Request) -> web.Response:
        _, folder = self._found(request)
        json = request.content_type == "application/json"
        paths = (await request.json())["paths"] if json else (await request.post()).getall("paths")
        asked = {str(path) for path in paths}
        return web.json_response([await self._entry(folder, f) for f in _files(folder) if _path(folder, f) in asked])

    async def _file(self, request: web.Request) -> web.StreamResponse:
        _, folder = self._found(request)
        headers = {"X-Repo-Commit": self._commit(folder)}
        file = (folder / request.match_info["path"]).resolve()
        if not (file.is_file() and file.is_relative_to(folder.resolve())):
            raise _not_found("EntryNotFound", f"the model has no {request.match_info['path']}", headers)
        headers["X-Linked-ETag"] = f'"{await self._digest(file)}"'
        headers["X-Linked-Size"] = str(file.stat().st_size)
        return web.FileResponse(file, headers=headers)  # HEAD, ranges and Content-Length are its own

    async def _nothing(self, request: web.Request) -> web.Response:
        self.requests.append(f"{request.method} {request.path}")
        raise _not_found("RepoNotFound", "nothing is served here")

    # -------------------------------------------------------------------------------------------------------- models

    def _found(self, request: web.Request) -> tuple[str, Path]:
        self.requests.append(f"{request.method} {request.path}")
        model = "{owner}/{name}".format(**request.match_info)
        if (folder := self._models.get(model)) is None:
            raise _not_found("RepoNotFound", f"there is no model {model}")
        if request.match_info.get("revision", REVISION) not in {REVISION, self._commit(folder)}:
            raise _not_found("RevisionNotFound", f"{model} has no such revision")
        return model, folder

    def _commit(self, folder: Path) -> str:
        """Return an id that changes when a file changes, like a commit's."""
        seen = hashlib.sha1(usedforsecurity=False)
        for file in _files(folder):
            seen.update(f"{_path(folder, file)} {file.stat().st_size} {file.stat().st_mtime_ns}\n".encode())
        return seen.hexdigest()

    async def _entry(self, folder: Path, file: Path) -> dict[str, Any]:
        size, digest = file.stat().st_size, await self._digest(file)
        return {"type": "file", "oid": digest[:40], "size": size, "path": _path(folder, file)}

    async def _digest(self, file: Path) -> str:
        key = (file, file.stat().st_size, file.stat().st_mtime_ns)
        if key not in self._digests:
            self._digests[key] = await asyncio.to_thread(_sha256, file)
        return self._digests[key]


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _path(folder: Path, file: Path) -> str:
    return file.relative_to(folder).as_posix()


def _not_found(code: str, message: str, headers: Mapping[str, str] | None = None) -> web.HTTPNotFound:
    """Return a 404 in the Hub's form, whose clients read the error code from a header."""
    return web.HTTPNotFound(headers={"X-Error-Code": code, "X-Error-Message": message, **(headers or {})}, text=message)

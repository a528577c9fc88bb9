"""Static files of the pages, held in memory: no request names a path of the disk."""

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from aiohttp import web

TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PREFIX = "/ui/static/"
YEAR_S = 31_536_000


@dataclass(frozen=True, kw_only=True)
class StaticFile:
    """One file, plain and compressed."""

    content: bytes
    compressed: bytes
    media_type: str
    sha256: str


@cache
def static_files() -> Mapping[str, StaticFile]:
    """Return all static files by their path below `static/`."""
    root = files("broker.web") / "static"
    loaded = {}
    for folder, prefix in ((root, ""), (root / "vendor", "vendor/")):
        for entry in folder.iterdir():
            kind = TYPES.get("." + entry.name.rpartition(".")[2])
            if kind is not None and entry.is_file():
                content = entry.read_bytes()
                loaded[prefix + entry.name] = StaticFile(
                    content=content,
                    compressed=gzip.compress(content, 9, mtime=0),
                    media_type=kind,
                    sha256=hashlib.sha256(content).hexdigest(),
                )
    return loaded


def static_url(path: str) -> str:
    """Return the URL of a static file. It changes with the content, so that browsers keep it for long."""
    return f"{PREFIX}{path}?v={static_files()[path].sha256[:12]}"


async def serve(request: web.Request) -> web.Response:
    """Answer with a static file, compressed if the browser takes that. Raises HTTPNotFound."""
    file = static_files().get(request.match_info["path"])
    if file is None:
        raise web.HTTPNotFound
    headers = {"Cache-Control": f"public, max-age={YEAR_S}, immutable", "Vary": "Accept-Encoding"}
    if "gzip" not in request.headers.get("Accept-Encoding", ""):
        return web.Response(body=file.content, content_type=file.media_type, charset="utf-8", headers=headers)
    headers["Content-Encoding"] = "gzip"
    return web.Response(body=file.compressed, content_type=file.media_type, charset="utf-8", headers=headers)

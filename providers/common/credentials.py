"""Credentials as each cloud's own command line keeps them, or by environment; read anew, never written, never shown.

The environment wins over files, as it does in the clouds' tools.
"""

import hashlib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from broker.domain.errors import Rejected

_AWS_FILES = {"AWS_SHARED_CREDENTIALS_FILE": ".aws/credentials", "AWS_CONFIG_FILE": ".aws/config"}
"""Variables that move the two files of AWS, and where they are otherwise."""
_AWS_CACHES = (".aws/sso/cache", ".aws/login/cache")
"""Short-lived tokens of `aws sso login` and `aws login`."""
_AWS_SOURCES = (
    "AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Credential:
    """One cloud's API key and where it was found."""

    key: str = field(repr=False)
    source: str
    """A variable's name or a file, for people."""


@dataclass(frozen=True, kw_only=True)
class _KeyLocation:
    """Where a cloud's key may be, and what its own tool expects to find."""

    cloud: str
    variable: str
    files: tuple[str, ...]
    """Relative to the home, the current one first: SkyPilot and the cloud's own tool read that one."""
    parse: Callable[[str], str | None]
    write: Callable[[str], str]
    page: str
    """Where people get a key."""


def _runpod_toml(text: str) -> str | None:
    profile = tomllib.loads(text).get("default")
    key = profile.get("api_key") if isinstance(profile, dict) else None
    return key if isinstance(key, str) else None


def _lambda_keys(text: str) -> str | None:
    for line in text.splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "api_key":
            return value.strip()
    return None


_PLACES = {
    "runpod": _KeyLocation(
        cloud="RunPod", variable="RUNPOD_API_KEY", files=(".runpod/config.toml",), parse=_runpod_toml,
        write=lambda key: f'[default]\napi_key = "{key}"\n', page="https://www.console.runpod.io/user/settings",
    ),
    "vast": _KeyLocation(
        cloud="Vast", variable="VAST_API_KEY", files=(".config/vastai/vast_api_key", ".vast_api_key"),
        parse=str.strip, write=lambda key: key, page="https://cloud.vast.ai/manage-keys/",
    ),
    "lambda": _KeyLocation(
        cloud="Lambda", variable="LAMBDA_API_KEY", files=(".lambda_cloud/lambda_keys",), parse=_lambda_keys,
        write=lambda key: f"api_key = {key}\n", page="https://cloud.lambda.ai/api-keys",
    ),
}  # fmt: skip


def key_of(cloud: str, env: Mapping[str, str], home: Path) -> Credential:
    """The key of `runpod`, `vast` or `lambda`. Raises Rejected: what is missing and where to get it, in one line."""
    place = _PLACES[cloud]
    if key := env.get(place.variable, "").strip():
        return Credential(key=_plain(place, key, place.variable), source=place.variable)
    for file in place.files:
        path = home / file
        try:
            key = place.parse(path.read_text(encoding="utf-8")) or ""
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as e:
            raise Rejected(f"{place.cloud}: ~/{file} cannot be read: {_line(e)}; {key_help(cloud)}") from None
        if not key:
            raise Rejected(f"{place.cloud}: ~/{file} holds no API key; {key_help(cloud)}")
        return Credential(key=_plain(place, key, f"~/{file}"), source=f"~/{file}")
    raise Rejected(f"{place.cloud}: no API key; {key_help(cloud)}")


def key_help(cloud: str) -> str:
    """How people get a working key of `runpod`, `vast` or `lambda`, as the end of a message."""
    place = _PLACES[cloud]
    return f"make one at {place.page} and put it into {place.variable} or ~/{place.files[0]}"


def aws_source(env: Mapping[str, str], home: Path) -> str | None:
    """Where boto3's chain would find something first; None: neither variables nor files (an instance role may be)."""
    for variable in _AWS_SOURCES:
        if env.get(variable):
            return variable
    return next((f"~/{name}" for path, name in _aws_files(env, home) if path.is_file()), None)


def sky_files(cloud: str, env: Mapping[str, str], home: Path) -> dict[str, bytes]:
    """What a private SkyPilot API server must find of one cloud in its own home, by path relative to it.

    Raises Rejected where there is no key; AWS may do without files.
    """
    if cloud == "aws":
        found = {name: _content(path) for path, name in _aws_files(env, home)}
        return {name: content for name, content in found.items() if content is not None}
    place = _PLACES[cloud]
    return {place.files[0]: place.write(key_of(cloud, env, home).key).encode()}


def sky_leftovers(cloud: str, home: Path, files: Iterable[str]) -> list[Path]:
    """Files of the cloud's credentials in a server's home that are none of `files`, and would count beside them."""
    if cloud != "aws":
        return []
    kept = {home / name for name in files}
    return [path for path, _ in _aws_files({}, home) if path not in kept and path.is_file()]


def digest_of(files: Mapping[str, bytes]) -> str:
    """Of what `sky_files` has read: it changes with whatever SkyPilot and we log in to the cloud with."""
    told = hashlib.sha256()
    for name, content in sorted(files.items()):
        told.update(f"{name} {len(content)} ".encode() + content)
    return told.hexdigest()


def sky_env(clouds: Iterable[str], env: Mapping[str, str], home: Path) -> dict[str, str]:
    """Environment that the server needs beside `sky_files`: AWS's own, without the places of files that were copied.

    The keys of the other clouds travel by file alone, since an environment is easier to see than a file.
    """
    if "aws" not in set(clouds):
        return {}
    copied = {variable for variable, path in _aws_paths(env, home).items() if path.is_file()}
    return {name: value for name, value in env.items() if name.startswith("AWS_") and name not in copied}


def _plain(place: _KeyLocation, key: str, source: str) -> str:
    """Keys are printable ASCII without spaces and quotes: what fits a header and every tool's file."""
    if not key.isascii() or not key.isprintable() or set(key) & set(" \"'\\"):
        raise Rejected(f"{place.cloud}: {source} holds something else than an API key; make one at {place.page}")
    return key


def _aws_paths(env: Mapping[str, str], home: Path) -> dict[str, Path]:
    """The two files of AWS by the variable that moves them."""
    return {variable: _path(env.get(variable), home / name, home) for variable, name in _AWS_FILES.items()}


def _aws_files(env: Mapping[str, str], home: Path) -> list[tuple[Path, str]]:
    files = [(path, _AWS_FILES[variable]) for variable, path in _aws_paths(env, home).items()]
    for cache in _AWS_CACHES:
        files += [(path, f"{cache}/{path.name}") for path in sorted((home / cache).glob("*.json"))]
    return files


def _content(path: Path) -> bytes | None:
    """None: there is no such file, or not any more. Raises Rejected."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as e:
        raise Rejected(f"AWS: {path} cannot be read: {_line(e)}") from None


def _path(given: str | None, usual: Path, home: Path) -> Path:
    if not given:
        return usual
    return home / given[2:] if given.startswith("~/") else Path(given)


def _line(e: Exception) -> str:
    """An exception without the text of a file, which may hold the key."""
    return e.strerror or "error" if isinstance(e, OSError) else type(e).__name__

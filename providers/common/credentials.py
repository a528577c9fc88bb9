"""Credentials from the environment, or from the files that each cloud's own command line stores.

The environment has priority over files, as in the clouds' tools. This module reads the files again at each call, never
writes them and never shows a key.
"""

import hashlib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from broker.domain.errors import Rejected

_AWS_FILES = {"AWS_SHARED_CREDENTIALS_FILE": ".aws/credentials", "AWS_CONFIG_FILE": ".aws/config"}
"""Default path of each of the two AWS files, by the variable that replaces the path."""
_AWS_CACHES = (".aws/sso/cache", ".aws/login/cache")
"""Folders with the short-lived tokens of `aws sso login` and `aws login`."""
_AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN")
_AWS_PROFILES = ("AWS_DEFAULT_PROFILE", "AWS_PROFILE")
"""Variables that name a profile. botocore reads the first that is set."""
_AWS_SOURCES = (
    "AWS_ACCESS_KEY_ID", *_AWS_PROFILES, "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Credential:
    """API key of one cloud and its source."""

    key: str = field(repr=False)
    source: str
    """Name of the variable, or path of the file, for messages."""


@dataclass(frozen=True, kw_only=True)
class _KeyLocation:
    """Places of one cloud's API key, and the file format of the cloud's own tool."""

    cloud: str
    variable: str
    files: tuple[str, ...]
    """Paths relative to the home. SkyPilot and the cloud's own tool read the first; the others are older paths."""
    parse: Callable[[str], str | None]
    write: Callable[[str], str]
    page: str
    """URL of the page on which a user creates a key."""


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
    """Return the key of `runpod`, `vast` or `lambda`. Raises Rejected with one line: the cause and the remedy."""
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


def source_of(cloud: str, env: Mapping[str, str], home: Path) -> str:
    """Return the variable or the file that holds the key of `runpod`, `vast` or `lambda`."""
    try:
        return key_of(cloud, env, home).source
    except Rejected:
        return "no key"


def key_help(cloud: str) -> str:
    """Return the end of a message: how to get a valid key of `runpod`, `vast` or `lambda`."""
    place = _PLACES[cloud]
    return f"make one at {place.page} and put it into {place.variable} or ~/{place.files[0]}"


def aws_source(env: Mapping[str, str], home: Path) -> str | None:
    """Return the first source of credentials in botocore's order: a variable or a file.

    None: there is neither, but an instance role may exist.
    """
    variables = aws_environment(env)
    for variable in _AWS_SOURCES:
        if env.get(variable) and (variable not in _AWS_PROFILES or variables.get("AWS_PROFILE") == env[variable]):
            return variable
    return next((f"~/{name}" for path, name in _aws_files(env, home) if path.is_file()), None)


def aws_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the AWS variables of `env` with one choice of credentials: keys, or one profile in `AWS_PROFILE`.

    botocore's order (botocore/credentials.py, session.py): keys before any profile that a variable names, and
    `AWS_DEFAULT_PROFILE` before `AWS_PROFILE`. Listing and creating both use the result, so they use one account.
    """
    variables = {name: value for name, value in env.items() if name.startswith("AWS_") and name not in _AWS_PROFILES}
    if env.get("AWS_ACCESS_KEY_ID"):
        return variables
    for name in _AWS_KEYS:
        variables.pop(name, None)
    profile = next((env[name] for name in _AWS_PROFILES if env.get(name)), "")
    return variables | ({"AWS_PROFILE": profile} if profile else {})


def sky_files(cloud: str, env: Mapping[str, str], home: Path) -> dict[str, bytes]:
    """Return the credential files that a private SkyPilot API server needs for one cloud, by path relative to its home.

    Raises Rejected if the key is missing. The result for AWS may be empty, because AWS works without files.
    """
    if cloud == "aws":
        contents = {name: _content(path) for path, name in _aws_files(env, home)}
        return {name: content for name, content in contents.items() if content is not None}
    place = _PLACES[cloud]
    return {place.files[0]: place.write(key_of(cloud, env, home).key).encode()}


def sky_leftovers(cloud: str, home: Path, files: Iterable[str]) -> list[Path]:
    """Return outdated credential files in a server's home: those not in `files`, which SkyPilot would also read."""
    if cloud != "aws":
        return []
    current = {home / name for name in files}
    return [path for path, _ in _aws_files({}, home) if path not in current and path.is_file()]


def digest_of(files: Mapping[str, bytes]) -> str:
    """Return a digest of the files from `sky_files`. A changed credential of the cloud changes the digest."""
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def sky_env(clouds: Iterable[str], env: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return the AWS variables that the server needs in addition to `sky_files`, without the paths of copied files.

    Keys of the other clouds are passed only as files, because other programs can read an environment more easily.
    """
    if "aws" not in set(clouds):
        return {}
    copied = {variable for variable, path in _aws_paths(env, home).items() if path.is_file()}
    return {name: value for name, value in aws_environment(env).items() if name not in copied}


def _plain(place: _KeyLocation, key: str, source: str) -> str:
    """Return the key if it is printable ASCII without spaces, quotes and backslashes. Raises Rejected otherwise.

    Such a key is valid in an HTTP header and in the file of each tool.
    """
    if not key.isascii() or not key.isprintable() or set(key) & set(" \"'\\"):
        raise Rejected(f"{place.cloud}: {source} holds no API key; make one at {place.page}")
    return key


def _aws_paths(env: Mapping[str, str], home: Path) -> dict[str, Path]:
    """Return the paths of the two AWS files, by the variable that replaces the default path."""
    return {variable: _path(env.get(variable), home / name, home) for variable, name in _AWS_FILES.items()}


def _aws_files(env: Mapping[str, str], home: Path) -> list[tuple[Path, str]]:
    files = [(path, _AWS_FILES[variable]) for variable, path in _aws_paths(env, home).items()]
    for cache in _AWS_CACHES:
        files += [(path, f"{cache}/{path.name}") for path in sorted((home / cache).glob("*.json"))]
    return files


def _content(path: Path) -> bytes | None:
    """Return the content of the file, or None if the file is absent. Raises Rejected if it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as e:
        raise Rejected(f"AWS: {path} cannot be read: {_line(e)}") from None


def _path(path_text: str | None, usual: Path, home: Path) -> Path:
    if not path_text:
        return usual
    return home / path_text[2:] if path_text.startswith("~/") else Path(path_text)


def _line(e: Exception) -> str:
    """Return the kind of an exception. Its full text may quote the file, and thus the key."""
    return e.strerror or "error" if isinstance(e, OSError) else type(e).__name__

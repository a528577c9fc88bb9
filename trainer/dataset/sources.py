"""Location of a dataset, and its transfer to this machine.

A dataset is a file, a folder, or several files by a pattern; on this machine, on the Hub, or in a bucket. Remote files
are cached, and fetched again only if they changed.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trainer.contract.data_config import DataConfig, DataFormat
from trainer.dataset import archives
from trainer.dataset.name_patterns import BadPattern, NamePattern
from trainer.dataset.prompts import DataError
from trainer.dataset.readers import format_of, table_of

BUCKETS = ("s3://", "gs://")
DATASETS = "hf://datasets/"
HUB = "https://huggingface.co"
MAGIC = re.compile(r"[*?\[{]")
"""Characters that make a path a pattern: `*`, `**`, `?`, `[a-z]`, `{a,b}`."""
DATASET = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+?))?(?:/(?P<pattern>[^@]*))?")
TRAINING = re.compile(r"(^|[/_.-])train([/_.-]|$)")
"""Names of files in a dataset's training split."""
REFUSED = re.compile(r"status code: 40[13]\b")
"""Error of obstore for a listing that Google refuses; it has no error type of its own."""
TIMEOUT_S = 20.0


class Unreachable(DataError):
    """Error of a source that does not answer now; a later request may succeed."""


@dataclass(frozen=True, kw_only=True)
class LocalDataset:
    """Dataset on this machine."""

    path: Path
    format: DataFormat
    name: str
    """Name of its file, for messages."""


def is_remote(path: str) -> bool:
    """Return True if a dataset is not on this machine."""
    return path.startswith((*BUCKETS, DATASETS))


@contextmanager
def gather(data: DataConfig, base_folder: Path, env: Mapping[str, str] = os.environ) -> Iterator[LocalDataset]:
    """Yield the dataset as one file: a single file as it is, several as a reproducible .tar.

    The bytes of the .tar depend on names and contents only. `base_folder`: folder to which a local path is relative.
    `env`: holds the credentials that `data.secret` names. A local file is not opened.

    Raises: DataError, Unreachable, and OSError for an unreadable local file.
    """
    local = base_folder / os.path.expanduser(data.path)
    if not is_remote(data.path) and not local.is_dir() and (local.exists() or not MAGIC.search(data.path)):
        yield LocalDataset(path=local, format=format_of(data.path, data.format), name=local.name)
        return
    if data.path.startswith(BUCKETS):
        files = _from_bucket(data, env)
    elif data.path.startswith(DATASETS):
        files = _from_hub(data, env)
    else:
        files = _from_disk(local)
    if not files:
        raise DataError(f"data.path: nothing is there for {data.path!r}; check the place and the pattern")
    if len(files) == 1 and not local.is_dir() and not data.path.endswith("/"):
        name, path = next(iter(files.items()))
        yield LocalDataset(path=path, format=format_of(name, data.format), name=PurePosixPath(name).name)
        return
    with tempfile.NamedTemporaryFile(prefix="data-", suffix=".tar") as file:
        archives.pack(files, file)  # type: ignore[arg-type]
        file.flush()
        name = local.resolve().name if local.is_dir() else "data"
        yield LocalDataset(path=Path(file.name), format="tar", name=f"{name}.tar")


@contextmanager
def readable(data: DataConfig, base_folder: Path) -> Iterator[LocalDataset]:
    """Yield the dataset as `gather`, and check that a local file is readable.

    Raises: DataError, also for unreadable local files.
    """
    try:
        with gather(data, base_folder) as dataset:
            if not dataset.path.exists():
                raise DataError(f"data.path: no file {str(dataset.path)!r}; paths are relative to the spec")
            yield dataset
    except OSError as e:
        raise DataError(f"data.path: {e.filename or data.path} cannot be read ({e.strerror or e})") from None


def _fixed_folder(pattern: str) -> str:
    """Return the folder before the first part that is a pattern, with its closing slash; empty if there is none."""
    parts = pattern.split("/")
    until = next((n for n, part in enumerate(parts) if MAGIC.search(part)), len(parts) - 1)
    return "".join(f"{part}/" for part in parts[:until])


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """Return the names that a pattern selects, sorted. A pattern that ends in a slash selects a whole folder.

    Hidden names never match. Raises: DataError.
    """
    return _selected(_parsed(pattern), names)


def _parsed(pattern: str) -> NamePattern:
    """Raise DataError for a pattern that cannot be used, before any listing."""
    try:
        return NamePattern(pattern)
    except BadPattern as e:
        raise DataError(f"data.path: {e}") from None


def _selected(pattern: NamePattern, names: Iterable[str]) -> list[str]:
    try:
        return pattern.selected(names)
    except BadPattern as e:
        raise DataError(f"data.path: {e}") from None


# ------------------------------------------------------------------------------------------------------- this machine


def _from_disk(path: Path) -> dict[str, Path]:
    root = path if path.is_dir() else Path(_fixed_folder(path.as_posix()) or ".")
    pattern = _parsed("**" if path.is_dir() else path.as_posix().removeprefix(_fixed_folder(path.as_posix())))
    files = {p.relative_to(root).as_posix(): p for p in root.rglob("*") if p.is_file() and not p.is_symlink()}
    return {name: files[name] for name in _selected(pattern, files)}


def _cache() -> Path:
    """Return the cache folder; it may be removed at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpubroker" / "data"


# ---------------------------------------------------------------------------------------------------------- a bucket


def _from_bucket(data: DataConfig, env: Mapping[str, str]) -> dict[str, Path]:
    import obstore
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    scheme, _, rest = data.path.partition("://")
    bucket, _, pattern = rest.partition("/")
    fixed = _fixed_folder(pattern)
    single = bool(pattern) and not pattern.endswith("/") and not MAGIC.search(pattern)
    matcher = _parsed("" if single else pattern or "**")
    try:
        store = _connected(f"{scheme}://{bucket}", data, env)
        if single:
            objects: list[Any] = [obstore.head(store, pattern)]
        else:
            objects = [meta for batch in obstore.list(store, fixed or None) for meta in batch]
        by_name = {meta["path"]: meta for meta in objects}
        names = [pattern] if single else _selected(matcher, by_name)
        return {name.removeprefix(fixed): _fetched(store, f"{scheme}://{bucket}", by_name[name]) for name in names}
    except FileNotFoundError:
        raise DataError(f"data.path: there is no {data.path!r}; check bucket and key") from None
    except BaseError as e:
        if isinstance(e, (PermissionDeniedError, UnauthenticatedError)) or REFUSED.search(str(e)):
            own = "this machine's credentials; set data.secret"
            credentials = f"the credentials in {data.secret}" if data.secret else own
            raise DataError(f"data.path: {data.path!r} may not be read with {credentials}") from None
        raise Unreachable(f"data.path: {data.path!r} cannot be read ({_first_line(e)}); try again") from None


def _connected(url: str, data: DataConfig, env: Mapping[str, str]) -> Any:
    """Return the bucket, with the credentials that `data.secret` names or those of this machine."""
    from trainer.objectstore.objects import ObjectStoreError, connect

    options: Any = {}
    if data.secret:
        try:
            options = json.loads(env.get(data.secret, ""))
        except ValueError:
            options = None
        if not isinstance(options, dict):
            fix = 'set the variable to one such as {"aws_access_key_id": "..."}'
            raise DataError(f"data.secret: {data.secret} is not a JSON object of the store's options here; {fix}")
    try:
        return connect(url, {str(k): str(v) for k, v in options.items()})
    except ObjectStoreError as e:
        raise DataError(f"data.path: {str(e).removeprefix('GPUBROKER_BLOBS ')}") from None


def _fetched(store: Any, url: str, meta: Mapping[str, Any]) -> Path:
    """Return the path of the object's copy on this machine, which is fetched once for each entity tag."""
    import obstore

    tag = meta.get("e_tag") or str(meta["last_modified"])
    identity = hashlib.sha256(f"{url}/{meta['path']}\n{tag}\n{meta['size']}".encode()).hexdigest()
    path = _cache() / identity[:32] / PurePosixPath(meta["path"]).name
    if path.exists() and path.stat().st_size == meta["size"]:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    same: Any = {"if_match": meta["e_tag"]} if meta.get("e_tag") else {}
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            for piece in obstore.get(store, meta["path"], options=same):
                file.write(piece)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    return path


# ------------------------------------------------------------------------------------------------------------ the Hub


def _from_hub(data: DataConfig, env: Mapping[str, str]) -> dict[str, Path]:
    """Return the files of a dataset that its pattern selects.

    Without a pattern these are its training tables, otherwise all tables, otherwise its pictures.
    """
    try:
        from huggingface_hub import HfApi, hf_hub_download
    except ImportError:
        raise DataError("data.path: the Hub needs huggingface_hub here; pip install huggingface_hub") from None
    parts = DATASET.fullmatch(data.path.removeprefix(DATASETS))
    if parts is None:
        raise DataError(
            f"data.path: {data.path!r} is not a dataset; write {DATASETS}owner/name, with @revision or /pattern"
        )
    repo, pattern = parts["repo"], parts["pattern"]
    matcher = _parsed(pattern) if pattern else None
    endpoint = (env.get("HF_ENDPOINT") or HUB).rstrip("/")
    page, token = f"{endpoint}/datasets/{repo}", env.get(data.secret or "HF_TOKEN") or None
    try:
        info = HfApi(endpoint=endpoint, token=token).dataset_info(repo, revision=parts["revision"], timeout=TIMEOUT_S)
        names = [sibling.rfilename for sibling in info.siblings or ()]
        fixed, files = _fixed_folder(pattern or ""), dict[str, Path]()
        for name in _selected(matcher, names) if matcher else default_files(names):
            local = hf_hub_download(repo, name, repo_type="dataset", revision=info.sha, endpoint=endpoint, token=token)
            files[name.removeprefix(fixed)] = Path(local)
        return files
    except DataError:
        raise
    except Exception as e:  # raised by the client below huggingface_hub, which differs between releases
        raise _hub_error(e, data, page) from None


def _hub_error(error: Exception, data: DataConfig, page: str) -> DataError:
    """Return why a dataset of the Hub is not available."""
    from huggingface_hub import errors

    token = data.secret or "HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        return DataError(f"data.path: {data.path!r} is gated; accept its terms at {page}, and set {token}")
    if isinstance(error, (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError)):
        return DataError(f"data.path: the Hub has no {data.path!r} for this token; check {page}, and {token}")
    return Unreachable(f"data.path: no usable answer from {page} ({type(error).__name__}); try again")


def default_files(names: Iterable[str]) -> list[str]:
    """Return the training tables among the names, otherwise all tables, otherwise all pictures."""
    data_files = matching(names, "**")
    tables = [name for name in data_files if table_of(name)]
    return (
        [name for name in tables if TRAINING.search(name)]
        or tables
        or [
            name
            for name in data_files
            if name.lower().endswith(archives.ENDINGS) or PurePosixPath(name).name in archives.METADATA
        ]
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

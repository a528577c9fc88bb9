"""Look up a model's config and shape in a local folder, the bundled catalogue or the Hub. No weights are read."""

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

from broker.domain.errors import GpubrokerError, InvalidInput, Problem
from broker.domain.workload import ModelShape
from broker.model_catalog import catalog, parameter_count
from broker.model_catalog.task_shape import task_shape
from broker.runtime.cpu_threads import RunCpu, run_inline
from trainer.contract.architectures import is_mixture, is_quantised
from trainer.contract.data_config import MODEL_FILES, model_files
from trainer.contract.train import TrainConfig

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MAX_CONFIG_BYTES = 1_000_000
CACHED_BYTES = 4_000_000
"""Bytes of all configs that are kept, as the Hub sent them. Their objects take up to 20 times as much."""
HUB = "https://huggingface.co"
CONFIG = "config.json"
MAIN = "main"
DIFFUSION = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")
"""Pipelines that the task `text_to_image` can train."""


class HubUnreachable(GpubrokerError):
    """The Hub did not answer, so the model is unknown."""


def _invalid(message: str) -> InvalidInput:
    return InvalidInput(Problem(field="train.model", message=message))


class HubClient:
    """A client that reads model configs from a Hub and keeps the latest up to CACHED_BYTES.

    `endpoint`: value of HF_ENDPOINT. `token`: token for private and gated models, or None.
    """

    def __init__(self, *, endpoint: str = HUB, token: str | None = None, timeout_s: float = 10.0) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._cache: dict[tuple[str, str, str], tuple[dict[str, Any], int]] = {}
        """(config, its bytes), the oldest first."""

    @classmethod
    def of_environment(cls, env: Mapping[str, str]) -> "HubClient":
        """Return a client configured by the Hub's variables `HF_TOKEN` and `HF_ENDPOINT`."""
        return cls(endpoint=env.get("HF_ENDPOINT") or HUB, token=env.get("HF_TOKEN") or None)

    async def config(self, model: str, file: str = CONFIG, revision: str = MAIN) -> dict[str, Any]:
        """Return the config of `owner/name`.

        Raises InvalidInput when the Hub refuses, HubUnreachable when it does not answer.
        """
        key = (model, file, revision)
        if (cached := self._cache.get(key)) is not None:
            return cached[0]
        status, body = await self._get(*key)
        config = self._parsed(model, file, status, body)
        self._cache[key] = (config, len(body))
        while sum(size for _, size in self._cache.values()) > CACHED_BYTES:
            del self._cache[next(iter(self._cache))]
        return config

    async def _get(self, model: str, file: str, revision: str) -> tuple[int, bytes]:
        url = f"{self._endpoint}/{model}/resolve/{quote(revision, safe='')}/{file}"
        try:
            async with (
                aiohttp.ClientSession(timeout=self._timeout, trust_env=True, auto_decompress=False) as session,
                session.get(url, headers=self._headers | {"Accept-Encoding": "identity"}) as answer,
            ):
                return answer.status, await _bounded_body(answer.content)
        except (aiohttp.ClientError, TimeoutError) as e:
            raise HubUnreachable(f"no answer from {self._endpoint} ({type(e).__name__})") from None

    def _parsed(self, model: str, file: str, status: int, body: bytes) -> dict[str, Any]:
        match status:
            case 200:
                return parse(body, model, file)
            case 401 | 403:
                raise _invalid(
                    f"{model!r} is gated or private, or does not exist: check the name, accept its licence at "
                    f"{self._endpoint}/{model}, and give the broker a token in HF_TOKEN"
                )
            case 404:
                raise _invalid(f"the Hub has no {model!r} with a {file}; check the owner and the name")
        raise HubUnreachable(f"{self._endpoint} answered {status}")


async def _bounded_body(content: aiohttp.StreamReader) -> bytes:
    """Return the body up to MAX_CONFIG_BYTES. One read returns only what has arrived."""
    body = bytearray()
    while len(body) < MAX_CONFIG_BYTES and (piece := await content.read(MAX_CONFIG_BYTES - len(body))):
        body += piece
    return bytes(body)


def parse(body: bytes, where: str, file: str = CONFIG) -> dict[str, Any]:
    """Parse the JSON object of a config. Raises InvalidInput."""
    try:
        config = json.loads(body)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise _invalid(f"{file} of {where!r} is not a JSON object; is this a transformers model?")
    return config


@dataclass(frozen=True, kw_only=True)
class FoundModel:
    """A model's config."""

    name: str
    config: Mapping[str, Any]
    bundled: bool = False
    """True if the config comes from the bundled catalogue, not from the Hub; shown to users."""


def _folder(model: str, files: Sequence[str]) -> FoundModel:
    path = Path(os.path.expanduser(model))
    if not os.path.isdir(path):  # os.path.isdir returns False for a name that is too long, Path.is_dir raises
        raise _invalid(f"no folder {model!r} on the broker's machine; give an existing one or a Hub id")
    try:
        missing = [p for p in files if not any(path.glob(p))]
        if missing:
            raise _invalid(f"{str(path)!r} has no {', '.join(missing)}; save model and tokenizer with save_pretrained")
        with open(path / files[0], "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _invalid(f"{files[0]} of {str(path)!r} is not a file; save the model with save_pretrained")
            body = file.read(MAX_CONFIG_BYTES)
    except OSError as e:
        raise _invalid(f"{str(path)!r} cannot be read: {e.strerror}; let the broker read it, or give an id") from None
    return FoundModel(name=path.name, config=parse(body, str(path), files[0]))


def _without_waiting(path: str, flags: int) -> int:
    """Open a file. A FIFO would otherwise wait for its writer forever."""
    return os.open(path, flags | os.O_NONBLOCK)


def is_folder(model: str) -> bool:
    """Return True if `model` is written as a folder of this machine, without reading the disk.

    A relative folder starts with `./` or `../`; otherwise `owner/name` could probe the daemon's working folder.
    """
    return model.startswith(("/", "./", "../", "~")) or model in (".", "..")


@dataclass(frozen=True, kw_only=True)
class Unshaped:
    """A model that can be trained but not estimated."""

    name: str
    positions: int | None = None
    """Longest supported row in tokens; None if unknown."""
    experts: bool = False
    """True for a mixture of experts."""


async def resolve_for(train: TrainConfig, *, hub: HubClient | None, run: RunCpu = run_inline) -> ModelShape | Unshaped:
    """Return the shape of the model as the task trains it.

    Raises InvalidInput like `find`, and for a model that the task cannot train. Raises Busy like `run`.
    """
    model = await find(train.model, hub=hub, files=model_files(train.task), revision=train.revision, run=run)
    return await run(partial(_shape, train, model))


def _shape(train: TrainConfig, model: FoundModel) -> ModelShape | Unshaped:
    if train.task == "text_to_image":
        if (kind := model.config.get("_class_name")) not in DIFFUSION:
            raise _invalid(f"{model.name!r} is of the kind {kind}; task text_to_image takes {' or '.join(DIFFUSION)}")
        return Unshaped(name=model.name)
    try:
        shape = task_shape(model.name, model.config, train.task)
    except InvalidInput:
        if not train.trust_remote_code or is_quantised(model.config):
            raise
        # only the model's own code defines its architecture
        return Unshaped(name=model.name, experts=is_mixture(model.config))
    if shape is None:
        return Unshaped(name=model.name, positions=_positions(model.config), experts=is_mixture(model.config))
    return replace(shape, bundled=model.bundled)


def _positions(config: Mapping[str, Any]) -> int | None:
    try:
        return parameter_count.positions(config)
    except ValueError:  # an unknown architecture may use another field
        return None


async def find(
    model: str,
    *,
    hub: HubClient | None,
    files: Sequence[str] = MODEL_FILES,
    revision: str | None = None,
    run: RunCpu = run_inline,
) -> FoundModel:
    """Return the config of a folder or a Hub id. Raises InvalidInput. `run` reads the disk.

    `files`: files that a folder must contain, the config first. `hub` None: search folders and the catalogue only.
    The Hub is also asked about gated models of the catalogue, so that the user learns of a missing licence before a
    purchase.
    """
    if is_folder(model):
        return await run(partial(_folder, model, files))
    if not HUB_ID.fullmatch(model):
        raise _invalid(f"{model!r} is neither a folder nor a Hub id; write owner/name, e.g. HuggingFaceTB/SmolLM2-135M")
    entry = catalog.find(model) if files[0] == CONFIG else None
    if entry is not None and (hub is None or not (entry.gated or revision)):
        return FoundModel(name=model, config=entry.config, bundled=True)
    if hub is None:
        raise _invalid(f"{model!r} is not in the bundled catalogue and the Hub is disabled; give a folder")
    try:
        return FoundModel(name=model, config=await hub.config(model, files[0], revision or MAIN))
    except HubUnreachable as e:
        if entry is not None:
            return FoundModel(name=model, config=entry.config, bundled=True)
        raise _invalid(f"cannot look up {model!r}: {e}; try again, or give a folder") from None

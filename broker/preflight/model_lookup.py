"""A model's config and shape: a folder of this machine, the bundled catalogue, or the Hub. No weight is read."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

from broker.domain.errors import GpubrokerError, InvalidInput, Problem
from broker.domain.workload import ModelShape
from broker.model_catalog import catalog as catalogue
from broker.model_catalog import parameter_count as count
from broker.model_catalog.task_shape import task_shape
from trainer.contract.architectures import is_quantised
from trainer.contract.train import MODEL_FILES, TrainConfig, model_files

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MAX_CONFIG_BYTES = 1_000_000
HUB = "https://huggingface.co"
CONFIG = "config.json"
MAIN = "main"
DIFFUSION = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")
"""Pipelines that `text_to_image` trains."""


class HubUnreachable(GpubrokerError):
    """No answer from the Hub, so nothing is known about the model."""


def _invalid(message: str) -> InvalidInput:
    return InvalidInput(Problem(field="train.model", message=message))


class HubClient:
    """Reads the configs of models from a Hub; answers are kept for the life of the client.

    `endpoint`: as HF_ENDPOINT, without a trailing slash. `token`: for private and gated models.
    """

    def __init__(self, *, endpoint: str = HUB, token: str | None = None, timeout_s: float = 10.0) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._known: dict[tuple[str, str, str], dict[str, Any]] = {}

    @classmethod
    def of_environment(cls, env: Mapping[str, str]) -> "HubClient":
        """By the Hub's own variables: `HF_TOKEN`, `HF_ENDPOINT`."""
        return cls(endpoint=env.get("HF_ENDPOINT") or HUB, token=env.get("HF_TOKEN") or None)

    async def config(self, model: str, file: str = CONFIG, revision: str = MAIN) -> dict[str, Any]:
        """The config of `owner/name`. Raises InvalidInput when the Hub refuses, HubUnreachable when it is silent."""
        which = (model, file, revision)
        if which not in self._known:
            self._known[which] = self._parsed(model, file, *await self._get(*which))
        return self._known[which]

    async def _get(self, model: str, file: str, revision: str) -> tuple[int, bytes]:
        url = f"{self._endpoint}/{model}/resolve/{quote(revision, safe='')}/{file}"
        try:
            async with (
                aiohttp.ClientSession(timeout=self._timeout, trust_env=True) as session,
                session.get(url, headers=self._headers) as answer,
            ):
                return answer.status, await answer.content.read(MAX_CONFIG_BYTES)
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


def parse(body: bytes, where: str, file: str = CONFIG) -> dict[str, Any]:
    """A config's JSON object. Raises InvalidInput."""
    try:
        config = json.loads(body)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise _invalid(f"{file} of {where!r} is not a JSON object; is this a transformers model?")
    return config


@dataclass(frozen=True, kw_only=True)
class FoundModel:
    """A model's config. `bundled`: nobody was asked about it, and people are told so."""

    name: str
    config: Mapping[str, Any]
    bundled: bool = False


def _folder(path: Path, files: Sequence[str]) -> FoundModel:
    missing = [p for p in files if not any(path.glob(p))]
    if missing:
        raise _invalid(f"{str(path)!r} lacks {', '.join(missing)}; save model and tokenizer with save_pretrained")
    return FoundModel(name=path.name, config=parse((path / files[0]).read_bytes(), str(path), files[0]))


def is_folder(model: str) -> bool:
    """Whether `model` names a folder of this machine rather than a Hub id."""
    return model.startswith(("/", "./", "../", "~")) or os.path.isdir(model)


@dataclass(frozen=True, kw_only=True)
class Unshaped:
    """A model that is trained, and that nobody estimates. `positions`: tokens of a row; None: nothing says."""

    name: str
    positions: int | None = None


async def resolve_for(train: TrainConfig, *, hub: HubClient | None) -> ModelShape | Unshaped:
    """The shape of the model as the task trains it. Raises InvalidInput as `find`, and for a model that the task cannot
    train.
    """
    found = await find(train.model, hub=hub, files=model_files(train.task), revision=train.revision)
    if train.task == "text_to_image":
        if (kind := found.config.get("_class_name")) not in DIFFUSION:
            raise _invalid(f"{found.name!r} is of the kind {kind}; task text_to_image takes {' or '.join(DIFFUSION)}")
        return Unshaped(name=found.name)
    try:
        shape = task_shape(found.name, found.config, train.task)
    except InvalidInput:
        if not train.trust_remote_code or is_quantised(found.config):
            raise
        return Unshaped(name=found.name)  # its own code says what it is
    if shape is None:
        return Unshaped(name=found.name, positions=_positions(found.config))
    return replace(shape, bundled=found.bundled)


def _positions(config: Mapping[str, Any]) -> int | None:
    try:
        return count.positions(config)
    except ValueError:  # a kind that nobody knows may say it otherwise
        return None


async def find(
    model: str, *, hub: HubClient | None, files: Sequence[str] = MODEL_FILES, revision: str | None = None
) -> FoundModel:
    """The config of a folder, which has to have `files`, or a Hub id; the first of `files` is the config's. `hub` None:
    only folders and the catalogue. Raises InvalidInput.

    The Hub is asked about gated models of the catalogue too, so that a missing licence is found before money is spent.
    """
    if is_folder(model):
        path = Path(os.path.expanduser(model))
        if not os.path.isdir(path):  # False, not an error, for a name that is too long
            raise _invalid(f"no folder {model!r} on the broker's machine; give an existing one or a Hub id")
        return _folder(path, files)
    if not HUB_ID.fullmatch(model):
        raise _invalid(f"{model!r} is neither a folder nor a Hub id; write owner/name, e.g. HuggingFaceTB/SmolLM2-135M")
    entry = catalogue.find(model) if files[0] == CONFIG else None
    if entry is not None and (hub is None or not (entry.gated or revision)):
        return FoundModel(name=model, config=entry.config, bundled=True)
    if hub is None:
        raise _invalid(f"{model!r} is not in the bundled catalogue and the Hub is switched off; give a folder")
    try:
        return FoundModel(name=model, config=await hub.config(model, files[0], revision or MAIN))
    except HubUnreachable as e:
        if entry is not None:
            return FoundModel(name=model, config=entry.config, bundled=True)
        raise _invalid(f"cannot look up {model!r}: {e}; try again, or give a folder") from None

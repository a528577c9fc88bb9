"""Bundled catalogue: configs of popular models as their owners published them, for use without the Hub.

`catalog.json` holds the fields that determine sizes, their source, the licence of the model, and the parameters of its
checkpoint (each tied matrix once). It contains no weights and no text of model cards.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from trainer.contract.suggestions import close_matches


@dataclass(frozen=True, kw_only=True)
class Published:
    """Facts about one model that need no network."""

    config: Mapping[str, Any]
    """Fields of its config.json that determine sizes."""
    parameters: int
    """Parameters of its checkpoint, each tied matrix once."""
    gated: bool
    """The Hub requires users to accept the licence first."""
    licence: str
    """Licence of the model; it does not cover the facts here."""
    source: str
    """URL of the config."""


@cache
def _entries() -> Mapping[str, Published]:
    rows: dict[str, dict[str, Any]] = json.loads((files(__package__) / "catalog.json").read_text())
    return {name: _published(name, rows) for name in rows}


def _published(name: str, rows: Mapping[str, dict[str, Any]]) -> Published:
    """Return the entry. A fine-tuned model has the config of its base model except for the fields in `but`."""
    base = rows[name].get("same_as", name)
    published = Published(**rows[base])
    if "but" not in rows[name]:
        return published
    config = {**published.config, **rows[name]["but"]}
    return replace(published, config=config, source=published.source.replace(base, name))


MOVED = ("FacebookAI", "distilbert", "google-bert", "google-t5", "openai-community")
"""Owners that the Hub assigned to models without an owner. The Hub still accepts the old names."""


def find(hub_id: str) -> Published | None:
    """Return the model of that exact Hub id, or old name such as t5-small; None if the catalogue lacks it."""
    every = _entries()
    ids = [hub_id] if "/" in hub_id else [f"{owner}/{hub_id}" for owner in MOVED]
    return next((every[name] for name in ids if name in every), None)


def names() -> tuple[str, ...]:
    """Return the Hub ids of all models in the catalogue."""
    return tuple(_entries())


def resembling(name: str, limit: int = 3) -> tuple[str, ...]:
    """Return models of the catalogue with this name and any owner, otherwise those with similar names."""
    word = name.rsplit("/", 1)[-1].lower()
    ends = {hub_id: hub_id.rsplit("/", 1)[-1].lower() for hub_id in names()}
    same = [hub_id for hub_id, end in ends.items() if end == word]
    holding = [hub_id for hub_id, end in ends.items() if len(word) > 3 and word in end]
    nearest = close_matches(word, ends.values(), n=limit, cutoff=0.7)
    return tuple(same or holding or [hub_id for hub_id, end in ends.items() if end in nearest])[:limit]

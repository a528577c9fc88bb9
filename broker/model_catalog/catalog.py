"""The bundled catalogue: configs of popular models as their owners published them, for when the Hub cannot be asked.

`catalog.json` holds the fields that sizes follow from, as facts: where they are from, the licence of the model, and
how many parameters its checkpoint has (each tied matrix once). No weight and no text of a model card is in it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Published:
    """What is known of one model without asking anybody."""

    config: Mapping[str, Any]
    """The fields of its config.json that sizes follow from."""
    parameters: int
    """Of its checkpoint, each tied matrix once."""
    gated: bool
    """The Hub asks people to accept the licence first."""
    licence: str
    """Of the model; the facts here are not covered by it."""
    source: str
    """URL of the config."""


@cache
def _entries() -> Mapping[str, Published]:
    rows: dict[str, dict[str, Any]] = json.loads((files(__package__) / "catalog.json").read_text())
    return {name: _published(name, rows) for name in rows}


def _published(name: str, rows: Mapping[str, dict[str, Any]]) -> Published:
    """A tuned sibling is its base, `but` for the fields that its own config has otherwise."""
    base = rows[name].get("same_as", name)
    found = Published(**rows[base])
    if "but" not in rows[name]:
        return found
    config = {**found.config, **rows[name]["but"]}
    return replace(found, config=config, source=found.source.replace(base, name))


MOVED = ("FacebookAI", "distilbert", "google-bert", "google-t5", "openai-community")
"""Owners that the Hub gave to models that had none; it still knows these by their old names."""


def find(hub_id: str) -> Published | None:
    """The model of that exact Hub id, or old name such as t5-small; None when the catalogue lacks it."""
    every = _entries()
    ids = [hub_id] if "/" in hub_id else [f"{owner}/{hub_id}" for owner in MOVED]
    return next((every[name] for name in ids if name in every), None)


def names() -> tuple[str, ...]:
    """The Hub ids of all models in the catalogue."""
    return tuple(_entries())

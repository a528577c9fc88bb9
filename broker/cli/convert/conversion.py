"""A conversion: reads settings of the other tool's file, and notes those without a counterpart."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from math import ceil
from typing import Any

from broker.cli.core.exit_codes import BadInput
from trainer.contract.script import line_words
from trainer.contract.yaml_document import YamlDocument

PROVIDERS = {"aws": "aws", "lambda": "lambda", "runpod": "runpod", "vast": "vast", "vastai": "vast"}
"""The broker's name of each cloud that it can use."""
NAME_CHARACTERS = 63
MACHINES_END = "is not needed; a job's machines are bought for it and destroyed at its end"
"""Hint at settings for the reuse and the end of machines."""
QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(x|[GMT]i?B?)?\s*(?:\+|\.\..*)?\s*", re.IGNORECASE)
"""A least number, as in `8`, `8+`, `32GB..64GB` or `2x`."""
GB_OF_UNIT = {"": 1.0, "G": 1.0, "M": 0.001, "T": 1000.0}


@dataclass
class Conversion:
    """The spec so far, and the remarks about it. `taken` settings of the other file need no remark."""

    document: YamlDocument
    spec: dict[str, Any] = field(default_factory=dict)
    lost: list[tuple[str, str]] = field(default_factory=list)
    """Settings without a counterpart: field and reason."""
    hints: list[tuple[str, str]] = field(default_factory=list)
    """Steps that are left to the user: field and text."""

    def lose(self, *path: str, why: str = "has no counterpart") -> None:
        if (remark := (".".join(path), why)) not in self.lost:
            self.lost.append(remark)

    def hint(self, *path: str, text: str) -> None:
        self.hints.append((".".join(path), text))

    def lose_rest(self, settings: dict[str, Any], *above: str) -> None:
        """Note all settings that are left. Empty ones mean nothing; 0 is a value."""
        for name, value in settings.items():
            if value is not False and value not in (None, {}, []):
                self.lose(*above, str(name))

    def lines(self, remarks: Iterable[tuple[str, str]]) -> list[str]:
        """Return remarks as `file:line: field: text`."""
        return [f"{self.document.place(tuple(where.split('.')))}: {where}: {text}" for where, text in remarks]

    def group(self, name: str) -> dict[str, Any]:
        """Return a group of settings of the spec, made by its first use."""
        inner: dict[str, Any] = self.spec.setdefault(name, {})
        return inner

    def refuse(self, field: str, message: str) -> BadInput:
        return BadInput("\n".join(self.lines([(field, message)])), problems=((field, message),))

    def name(self, value: Any, default: str) -> None:
        """Set the job's name in the broker's characters."""
        name = re.sub(r"[^a-z0-9]+", "-", str(value or default).lower()).strip("-")[:NAME_CHARACTERS].strip("-")
        self.spec["name"] = name or "job"

    def providers(self, names: Iterable[Any], *path: str) -> None:
        """Set the clouds; those that the broker cannot use are lost."""
        for name in names:
            provider = PROVIDERS.get(str(name).lower())
            if provider is None:
                self.lose(*path, why=f"{name} is not one of the broker's clouds ({', '.join(sorted(PROVIDERS))})")
            else:
                self.add("providers", provider)

    def add(self, setting: str, value: str) -> None:
        """Add a value to a list of `resources`, once."""
        values: list[str] = self.group("resources").setdefault(setting, [])
        if value not in values:
            values.append(value)

    def hourly_limit(self, usd_per_machine: Any, *path: str) -> None:
        """Set the limit for all nodes from the other tool's limit for one. `resources.nodes` is set before."""
        nodes = int(self.group("resources").get("nodes", 1))
        usd = float(Decimal(str(float(usd_per_machine))) * nodes)
        self.group("resources")["max_usd_per_hour"] = usd
        if nodes > 1:
            self.hint(*path, text=f"limits one machine; max_usd_per_hour {usd:g} limits all {nodes}")

    def least(self, setting: str, value: Any, *path: str) -> None:
        """Set a least number of `resources`; a multiple such as `4x` is of the `cpus`, which are set before."""
        match = QUANTITY.fullmatch(str(value))
        unit = (match[2] or "")[:1].upper() if match else ""
        factor = self.group("resources").get("cpus") if unit == "X" else GB_OF_UNIT.get(unit)
        if match is None or factor is None:
            self.lose(*path, why=f"{value} has no least number, which the broker needs")
        else:
            self.group("resources")[setting] = ceil(float(match[1]) * factor)

    def environment(self, values: dict[str, Any], *path: str) -> None:
        """Set variables as text. Those without a value must be given."""
        for name, value in values.items():
            if value is None:
                self.lose(*path, name, why=f"has no value; give it in the spec, or with --set env.{name}=VALUE")
            else:
                key = (*path, name)
                text = value if isinstance(value, str) else self.document.texts.get(key, str(value))
                self.group("env")[name] = text

    def secrets(self, names: Iterable[str], *path: str) -> None:
        """Set names of secrets. Their values are never copied."""
        for name in names:
            self.spec.setdefault("secrets", []).append(name)
            self.hint(*path, name, text=f"store it with `gpubroker secret set {name}`; the spec names it only")

    def command(self, lines: str) -> None:
        """Set the command: the words of one simple line, otherwise a script for bash."""
        lines = lines.strip()
        self.group("script")["command"] = line_words(lines) or ["bash", "-c", lines + "\n"]

    def image(self, reference: str, *path: str) -> None:
        """Set the container image."""
        self.group("script")["image"] = reference
        self.hint(*path, text="RunPod and Vast run a job's image; it needs bash and Python 3.11 or newer")

    def setup(self, lines: str) -> None:
        """Set the set-up commands, as one script for bash."""
        if lines.strip():
            self.group("script")["setup"] = [lines.strip() + "\n"]
            self.hint("setup", text="runs before each start, also after a preemption, and stops at a line that fails")

    def closing_hints(self) -> None:
        """Add the hints of every converted job."""
        if "cap_usd" not in self.spec:
            self.hint("cap_usd", text="the other file has no limit; set the dollars that the job never exceeds")
        self.hint("script.checkpoints", text="save to $GPUBROKER_CHECKPOINT_DIR, or set script.checkpoints: false")

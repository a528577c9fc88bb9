"""One change of SkyPilot, and what it may ask of the server and the launch under way.

A SkyPilot that is not exactly the one that a change was written for is refused.
"""

import functools
import importlib
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from providers.skypilot.shared import LOCK, PIN, SKY_VERSION, STATE

Replacement = Callable[..., Any]


class Patch:
    """One attribute of SkyPilot, replaced by what `make` returns for the original; twice is once."""

    def __init__(self, module: str, attribute: str, parameters: str | None, make: Callable[[Any], Any]) -> None:
        """`parameters`: names that the original must have, in order; None for a plain value."""
        self.module, self.attribute, self._parameters, self._make = module, attribute, parameters, make

    def apply(self) -> None:
        """Raises RuntimeError with one line when SkyPilot is not what the patch was written for."""
        path = self.attribute.split(".")
        holder: Any = importlib.import_module(self.module)
        for part in path[:-1]:
            holder = getattr(holder, part, None)
        original = getattr(holder, path[-1], None)
        if getattr(original, "gpubroker", False):
            return
        if original is None:
            raise RuntimeError(
                f"gpubroker: {self.module}.{self.attribute} is not in this SkyPilot: install {SKY_VERSION}"
            )
        if self._parameters is not None:
            found = " ".join(inspect.signature(original).parameters)
            if found != self._parameters:
                raise RuntimeError(
                    f"gpubroker: {self.module}.{self.attribute}({found}) is not SkyPilot {SKY_VERSION}'s"
                )
        replacement = self._make(original)
        if callable(replacement):
            functools.update_wrapper(replacement, original)
            replacement.gpubroker = True
        static = isinstance(inspect.getattr_static(holder, path[-1]), staticmethod)
        setattr(holder, path[-1], staticmethod(replacement) if static else replacement)


def state_folder() -> Path:
    return Path(os.environ.get(STATE) or "~/.sky/gpubroker").expanduser()


def private() -> bool:
    """Whether this server is a daemon's own; a team's goes on doing what others need of it."""
    return bool(os.environ.get(LOCK))


def pin() -> dict[str, str]:
    """Which exact thing the launch under way has to buy."""
    found: dict[str, str] = json.loads(os.environ.get(PIN, "{}"))
    return found

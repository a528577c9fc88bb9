"""Replacement of one attribute of SkyPilot, and accessors to the environment of the server and the current launch.

A patch refuses a SkyPilot other than the version for which it was written.
"""

import functools
import importlib
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .shared import LOCK, PIN, SKY_VERSION, STATE

Replacement = Callable[..., Any]


class Patch:
    """Replacement of one attribute of SkyPilot with the result of `make(original)`. A second `apply` does nothing."""

    def __init__(self, module: str, attribute: str, parameters: str | None, make: Callable[[Any], Any]) -> None:
        """Describe the patch without applying it.

        `parameters`: names of the original's parameters, in order, separated by spaces; None: they are not checked.
        """
        self.module, self.attribute, self._parameters, self._make = module, attribute, parameters, make

    def apply(self) -> None:
        """Replace the attribute. Raises RuntimeError with one line if SkyPilot is not the expected version."""
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
            parameters = " ".join(inspect.signature(original).parameters)
            if parameters != self._parameters:
                raise RuntimeError(
                    f"gpubroker: {self.module}.{self.attribute}({parameters}) has other parameters in this SkyPilot: "
                    f"install {SKY_VERSION}"
                )
        replacement = self._make(original)
        if callable(replacement):
            functools.update_wrapper(replacement, original)
            replacement.gpubroker = True
        static = isinstance(inspect.getattr_static(holder, path[-1]), staticmethod)
        setattr(holder, path[-1], staticmethod(replacement) if static else replacement)


def state_folder() -> Path:
    return Path(os.environ.get(STATE) or "~/.sky/gpubroker").expanduser()


def is_private_server() -> bool:
    """Return True on a daemon's own server; a team's server keeps its normal behaviour for its other users."""
    return bool(os.environ.get(LOCK))


def pin() -> dict[str, str]:
    """Return `Purchase.pin` of the current launch; empty: the launch is not restricted."""
    purchase_pin: dict[str, str] = json.loads(os.environ.get(PIN, "{}"))
    return purchase_pin

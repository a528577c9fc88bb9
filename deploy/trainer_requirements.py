"""Print the `trainer` extra of pyproject.toml and those named as arguments, one requirement a line: a trainer's needs,
nothing of the broker."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
print(*(line for name in ("trainer", *sys.argv[1:]) for line in extras[name]), sep="\n")

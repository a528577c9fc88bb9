"""Print the requirements of pyproject.toml's extra `trainer` and of the extras named as arguments, one a line."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
print(*(line for name in ("trainer", *sys.argv[1:]) for line in extras[name]), sep="\n")

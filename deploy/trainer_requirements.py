"""Print the `trainer` extra of pyproject.toml, one requirement a line: a trainer's needs, nothing of the broker."""

from __future__ import annotations

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
print(*project["optional-dependencies"]["trainer"], sep="\n")

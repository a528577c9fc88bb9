"""Print the requirements of pyproject.toml's extra `trainer` and of the extras named as arguments, one a line.

`--agent`: print those of the agent alone, which runs a job's own program.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
AGENT = ("cryptography", "nvidia-ml-py", "obstore", "psutil", "pydantic", "pydantic-core", "pyyaml")
if sys.argv[1:] == ["--agent"]:
    print(*(line for line in extras["trainer"] if re.split("[<>=;]", line)[0] in AGENT), sep="\n")
    sys.exit()
print(*(line for name in ("trainer", *sys.argv[1:]) for line in extras[name]), sep="\n")

"""Limit of open files."""

import subprocess
import sys

import pytest

CODE = """
import resource, sys
from broker.daemon.listeners import TooFewFiles, allow_files
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
try:
    allow_files()
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except TooFewFiles as refusal:
    print(refusal)
"""


@pytest.mark.parametrize(("hard", "printed"), [(512, "512\n"), (100, "may open 100 files only, and needs 256")])
def test_the_limit_of_files_is_raised_or_named(hard: int, printed: str) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, str(hard)], capture_output=True, text=True, check=True)
    assert printed in done.stdout

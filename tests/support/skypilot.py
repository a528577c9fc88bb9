"""SkyPilot's environment, found as the daemon finds it, for tests that run SkyPilot's own code."""

import os
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from broker.domain.errors import Rejected
from providers.skypilot.environment import find_python, require_plugin


@cache
def sky_python() -> str:
    """Return the interpreter of SkyPilot's environment, with the plugin of this checkout. Fails if there is none."""
    python = find_python(None, Path("/nonexistent"))
    try:
        require_plugin(python)
    except Rejected as e:
        raise AssertionError(f"{e} (in a checkout: `make venv`)") from None
    return str(python)


def run_in_skypilot(script: str, *arguments: str, home: Path, env: Mapping[str, str] | None = None) -> str:
    """Run a program in SkyPilot's environment and return its output; its failure fails the test."""
    own = {"HOME": str(home), "SKY_RUNTIME_DIR": str(home), "PATH": os.environ["PATH"], **(env or {})}
    done = subprocess.run(
        [sky_python(), "-c", script, *arguments], env=own, cwd=home, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout

"""Health check of containers, `python -m broker.daemon.healthcheck`: checks that the daemon's /readyz answers 200.

The exit status is 0 for a ready daemon, otherwise 1 with the problem on stdout. Imports are few, for a quick start.
"""

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

from broker.domain.formatting import visible
from broker.paths import trusting

TIMEOUT_S = 5.0


def problem(home: Path) -> str | None:
    """Return why the daemon is not ready; None: it is ready."""
    try:
        at = json.loads((home / "client.json").read_text())
        request = urllib.request.Request(f"{at['url']}/readyz", headers={"Accept": "application/json"})
        context = trusting(at["certificate"]) if at.get("certificate") else None
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context):
            return None
    except urllib.error.HTTPError as refused:
        return refused.read(2000).decode("utf-8", "replace")
    except (OSError, ValueError, KeyError, TypeError) as e:
        return f"{type(e).__name__}: {e}"


if __name__ == "__main__":
    fault = problem(Path(os.environ["GPUBROKER_HOME"]))
    if fault is not None:
        print(visible(fault))
    sys.exit(fault is not None)

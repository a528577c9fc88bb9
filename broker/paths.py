"""Names and locations of files that both the daemon and the client use."""

import os
from pathlib import Path

CONFIG_FILE = "gpubroker.yaml"
CLIENT_FILE = "client.json"


def default_home() -> Path:
    """Return `$GPUBROKER_HOME`, or by default the XDG state folder of this user."""
    if home := os.environ.get("GPUBROKER_HOME"):
        return Path(home).expanduser().absolute()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "gpubroker"

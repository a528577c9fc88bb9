"""Where the files of an installation lie: what both the daemon and the client need."""

import os
from pathlib import Path

CONFIG_FILE = "gpubroker.yaml"


CLIENT_FILE = "client.json"


def default_home() -> Path:
    """`$GPUBROKER_HOME`, else the state folder of this user by the XDG convention."""
    if home := os.environ.get("GPUBROKER_HOME"):
        return Path(home).expanduser().absolute()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "gpubroker"

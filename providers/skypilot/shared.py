"""What the daemon and its part inside SkyPilot's API server must agree on; importable without SkyPilot."""

import hashlib
from importlib.resources import files

SKY_VERSION = "0.14.1"
PLUGIN = "providers.skypilot.plugin.plugin.GpuBroker"
_PARTS = (
    "skypilot/shared.py", "skypilot/server_locks.py", "skypilot/ssh.py", "skypilot/plugin/fresh_keys.py",
    "skypilot/plugin/patch.py", "skypilot/plugin/patches.py", "skypilot/plugin/aws_patches.py",
    "skypilot/plugin/task_start.py", "skypilot/plugin/plugin.py", "machine/start.sh",
)  # fmt: skip


def _version() -> str:
    texts = [(files("providers") / part).read_bytes() for part in _PARTS]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:12]


PLUGIN_VERSION = _version()
"""Follows from the plugin's code: a server with another one is not adopted."""
CLOUDS = ("aws", "lambda", "runpod", "vast")
"""SkyPilot's names of what we buy from."""

LOCK = "GPUBROKER_SKY_SERVER"
"""Variable with the server's id: it marks every process of a server, and names the file that each holds an flock on."""
STATE = "GPUBROKER_SKY_STATE"
"""Variable with the folder of the two kinds of lock."""
TOKEN = "GPUBROKER_SKY_TOKEN"
"""Variable with the secret that every request must carry."""
TOKEN_HEADER = "X-Gpubroker-Token"

SERVERS, LAUNCHING = "servers", "launching"
"""Folders below the state folder: a file per server, a file per cluster."""
DEAD = b"dead"
"""Content of a server's file once its death was proven: no process begins under its name any more."""
PIN = "GPUBROKER_PIN"
"""Variable of one launch request: `Purchase.pin` as JSON."""
ROWS = "GPUBROKER_ROWS"
"""Variable of one launch request to a team's server: `Purchase.catalog` as JSON."""
ANYWHERE = "community"
"""RunPod's zone of community hosts, which have no data centre."""
NOTHING = "nothing was asked for: "
"""Start of what a launch says that failed before any machine was asked for; the exception's class follows."""

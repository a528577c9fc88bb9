"""Constants shared by the daemon and its plugin inside SkyPilot's API server. The import needs no SkyPilot."""

import hashlib
from importlib.resources import files

SKY_VERSION = "0.14.1"
PACKAGE = "gpubroker_skypilot"
"""Name of this folder as a package in SkyPilot's environment."""
PLUGIN, SUPERVISOR = f"{PACKAGE}.plugin.GpuBroker", f"{PACKAGE}.server_supervisor"
"""Class of the plugin, and module of the server's supervisor process."""
PLUGIN_FILES = {
    path.name: path.read_bytes()
    for path in sorted(files(__name__.rpartition(".")[0]).iterdir(), key=lambda path: path.name)
    if path.name.endswith((".py", ".sh"))
}
"""Content of each file of the plugin, by name."""
PLUGIN_VERSION = hashlib.sha256(b"\0".join(PLUGIN_FILES.values())).hexdigest()[:12]
"""Digest of the plugin's code. The daemon does not adopt a server with another version."""
CLOUDS = ("aws", "lambda", "runpod", "vast")
"""Clouds that the broker buys from, by SkyPilot's names."""

LOCK = "GPUBROKER_SKY_SERVER"
"""Variable with the server's id in each process of the server. Each process holds an flock on the file of that name."""
STATE = "GPUBROKER_SKY_STATE"
"""Variable with the folder that holds the locks of servers and of launches."""
TOKEN = "GPUBROKER_SKY_TOKEN"
"""Variable with the secret that each request to the server must carry."""
TOKEN_HEADER = "X-Gpubroker-Token"

SERVERS, LAUNCHING = "servers", "launching"
"""Subfolders of the state folder with one file per server and one file per cluster that is being launched."""
DEAD = b"dead"
"""Content of a server's file after the proof that the server is dead. No process starts under that id again."""
PIN = "GPUBROKER_PIN"
"""Variable of one launch request: `Purchase.pin` as JSON."""
ROWS = "GPUBROKER_ROWS"
"""Variable of one launch request to a team's server: `Purchase.catalog` as JSON."""
COMMUNITY_ZONE = "community"
"""Zone in the catalog for RunPod's community hosts, which have no data centre."""
NOTHING_REQUESTED = "nothing was asked for: "
"""Prefix of the error of a launch that failed before any create request; the exception's class follows."""

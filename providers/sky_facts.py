"""What the daemon and its part inside SkyPilot's API server must agree on; importable without SkyPilot."""

SKY_VERSION = "0.14.1"
PLUGIN = "providers.sky_plugin.GpuBroker"
PLUGIN_VERSION = "1"
"""Goes up with every change of the plugin: a server with another one is not adopted."""
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

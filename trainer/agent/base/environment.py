"""Settings that the launcher passes in environment variables, so that none is visible in argv."""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

OWN = ("GPUBROKER_ATTEMPT_KEY", "GPUBROKER_STORE_OPTIONS", "GPUBROKER_GRANT_URL", "GPUBROKER_BLOBS")
"""Variables that no child process receives."""


class BadEnvironment(ValueError):
    """A variable is missing or malformed; the message names it."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Settings of the agent; the repr omits credentials."""

    blobs: str
    installation: str
    attempt: str
    node: int = 0
    key: str | None = field(default=None, repr=False)
    store_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    grant_url: str | None = field(default=None, repr=False)
    """URL that reads `grant.json` without credentials, for use after they expire."""
    workdir: Path
    master: str = "127.0.0.1:29400"
    """Address `host:port` of node 0, to which the nodes of a job connect; unused on a single node."""


def read_environment(env: Mapping[str, str]) -> Environment:
    """Parse the agent's settings from variables. Raises: BadEnvironment, naming the variable and the fix."""
    try:
        blobs, installation, attempt = (env[f"GPUBROKER_{n}"] for n in ("BLOBS", "INSTALLATION", "ATTEMPT"))
    except KeyError as e:
        raise BadEnvironment(
            f"{e.args[0]} is not set; the broker sets it, or use --config to train without a broker"
        ) from None
    try:
        node = int(env.get("GPUBROKER_NODE", "0"))
    except ValueError:
        raise BadEnvironment("GPUBROKER_NODE: not a number; give the node's rank from 0") from None
    try:
        options = json.loads(env.get("GPUBROKER_STORE_OPTIONS") or "{}")
    except json.JSONDecodeError:
        raise BadEnvironment("GPUBROKER_STORE_OPTIONS: not JSON; give an object of strings") from None
    workdir = env.get("GPUBROKER_WORKDIR") or tempfile.mkdtemp(prefix="gpubroker-")
    return Environment(
        blobs=blobs,
        installation=installation,
        attempt=attempt,
        node=node,
        key=env.get("GPUBROKER_ATTEMPT_KEY") or None,
        store_options={str(k): str(v) for k, v in options.items()},
        grant_url=env.get("GPUBROKER_GRANT_URL") or None,
        workdir=Path(workdir).resolve(),
        master=env.get("GPUBROKER_MASTER", "127.0.0.1:29400"),
    )

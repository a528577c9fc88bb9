"""Serves the emulated clouds: `python -m tests.clouds.serve [--machines paper|real] [--port N] [--model FOLDER]`.

Prints the endpoints, the variables that send SDKs and the daemon there, and a configuration to begin with.
"""

import argparse
import asyncio
import contextlib
import signal
from collections.abc import Mapping
from pathlib import Path

from tests.clouds.emulator import Clouds
from tests.clouds.hub import Hub
from tests.clouds.machine import Machines, PaperMachines

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER = Path(".demo/models/smollm2-135m-instruct")

INTRODUCTION = """\
The clouds are at {url}; so is the control door:
  curl {url}/_ctl/state
  curl -X POST {url}/_ctl/preempt -d '{{"machine_id": "…"}}'

Variables for the clouds' SDKs, SkyPilot and gpubroker:
{variables}

gpubroker.yaml to begin with:
  providers:
    runpod: {{endpoint: "{url}", emulated: true}}
    lambda: {{endpoint: "{url}", emulated: true}}
    vast: {{endpoint: "{url}", emulated: true}}

The key of every account is {key} (RUNPOD_API_KEY, VAST_API_KEY, LAMBDA_API_KEY).
Ctrl-C ends everything, machines included."""


async def machines(kind: str, forwards: Mapping[int, int]) -> Machines:
    """Return the machines. `real` needs root, namespaces and a baked root file system: see tests/clouds/README.md."""
    if kind == "paper":
        return PaperMachines()
    from tests.clouds.machines import NamespaceMachines

    return await NamespaceMachines.open(forwards=forwards)


async def serve(kind: str, port: int, folder: Path) -> None:
    """Serve the emulated clouds until SIGINT or SIGTERM."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with contextlib.AsyncExitStack() as stack:
        hub = await stack.enter_async_context(Hub({MODEL: folder})) if folder.is_dir() else None
        forwards = {} if hub is None else {hub.port: hub.port}
        clouds = await stack.enter_async_context(Clouds(await machines(kind, forwards), port=port))
        clouds.faults.limits.enforced = True
        variables = dict(clouds.environment) | ({} if hub is None else {"HF_ENDPOINT": hub.url})
        lines = [f"  export {name}={value}" for name, value in variables.items()]
        if hub is None:
            lines.append(f"  (no HF_ENDPOINT: {folder} does not exist; `make model` makes it)")
        print(INTRODUCTION.format(url=clouds.url, key=clouds.world.api_key, variables="\n".join(lines)), flush=True)
        await ended.wait()
        for line in clouds.violations:
            print(f"not in the schema: {line}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.clouds.serve", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machines", choices=["paper", "real"], default="paper", help="what is behind the APIs")
    parser.add_argument("--port", type=int, default=0, help="of the APIs; 0: any that is free")
    parser.add_argument("--model", type=Path, default=FOLDER, help=f"folder that the hub serves as {MODEL}")
    asked = parser.parse_args()
    asyncio.run(serve(asked.machines, asked.port, asked.model))


if __name__ == "__main__":
    main()

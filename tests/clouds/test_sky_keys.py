"""SkyPilot's next request after a key change uses the new key, even in a worker that has used the old key."""

import asyncio
import json
import os
import subprocess
from pathlib import Path

from providers.skypilot.key_copies import KeyCopies
from tests.support.skypilot import sky_python

WORKER = """
import sys
from types import SimpleNamespace
from sky.server import plugins
from gpubroker_skypilot.plugin import GpuBroker

GpuBroker().install(plugins.ExtensionContext(context=plugins.PluginContext.EXECUTOR))

import json, os
from sky import provision
from sky.adaptors import aws, runpod, vast
from sky.provision.lambda_cloud import lambda_utils
from sky.server.requests import executor, payloads
from sky.utils import annotations

for _ in sys.stdin:
    with executor.override_request_env_and_config(payloads.RequestBody(), "request", "sky.launch"):
        print(json.dumps({
            "runpod": runpod.runpod.api_key,
            "vast": vast.vast().client.api_key,
            "lambda": lambda_utils.LambdaCloudClient().api_key,
            "aws": aws.session().get_credentials().access_key,
        }), flush=True)
    annotations.clear_request_level_cache()
"""
"""Worker of SkyPilot's server. Each input line is one request, run as `sky.server.requests.executor` runs it."""


def keys(word: str) -> dict[str, dict[str, bytes]]:
    return {
        "runpod": {".runpod/config.toml": f'[default]\napi_key = "{word}"\n'.encode()},
        "vast": {".config/vastai/vast_api_key": word.encode()},
        "lambda": {".lambda_cloud/lambda_keys": f"api_key = {word}\n".encode()},
        "aws": {".aws/credentials": f"[default]\naws_access_key_id={word}\naws_secret_access_key=x\n".encode()},
    }


async def test_a_request_uses_the_keys_on_disk_at_that_time(tmp_path: Path) -> None:
    words = ["the-first-key", "the-second-key", "the-first-key"]
    copies = KeyCopies(tmp_path, lambda: keys(words[0]))
    copies.refresh()
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    process = await asyncio.create_subprocess_exec(
        sky_python(), "-c", WORKER, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(600):
            while words:
                copies.refresh()
                process.stdin.write(b"\n")
                used = json.loads(await process.stdout.readline())
                assert used == dict.fromkeys(("runpod", "vast", "lambda", "aws"), words.pop(0))
    finally:
        process.stdin.close()
        await process.wait()

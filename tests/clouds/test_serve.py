"""The command that serves the emulators."""

import asyncio
import re
import signal
import sys
from pathlib import Path

import aiohttp


async def test_the_server_prints_its_address_serves_and_ends(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.clouds.serve", "--model", str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(300):
            said = await process.stdout.readuntil(b"included.")
        variables = dict(re.findall(r"export (\w+)=(\S+)", said.decode()))
        assert set(variables) == {"RUNPOD_API_BASE_URL", "VAST_URL", "GPUBROKER_LAMBDA_ENDPOINT", "HF_ENDPOINT"}
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer test-key"}) as session:
            for url in (
                f"{variables['VAST_URL']}/api/v0/users/current/",
                f"{variables['GPUBROKER_LAMBDA_ENDPOINT']}/api/v1/instance-types",
                f"{variables['HF_ENDPOINT']}/HuggingFaceTB/SmolLM2-135M-Instruct/resolve/main/config.json",
                f"{variables['VAST_URL']}/api/v0/nothing/",
            ):  # fmt: skip
                async with session.get(url) as answer:
                    assert answer.status == (404 if "nothing" in url else 200), url
        process.send_signal(signal.SIGINT)
        rest, _ = await asyncio.wait_for(process.communicate(), 300)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0
    assert rest.decode().strip() == "not in the schema: vast: no such call: GET /api/v0/nothing/"

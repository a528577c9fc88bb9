"""Detection of this machine's GPUs, as a trainer on this machine would list them."""

import asyncio
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from providers.common.gpu_names import accelerator

_QUERY_TIMEOUT_S = 120.0
"""Timeout of the detection in seconds."""
_ASK_TORCH = """
import json, torch
found = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
print(json.dumps([[p.name, p.total_memory] for p in found]))
"""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    accelerator: str
    memory_bytes: int


async def gpus() -> Sequence[Gpu]:
    """Return the GPUs that torch lists.

    A separate process imports torch, because the import would cost the daemon seconds and memory. The result is empty
    after a timeout, without a driver, without torch, or if torch was built without support for the GPUs.
    """
    if shutil.which("nvidia-smi") is None and not Path("/dev/kfd").exists():
        return ()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", _ASK_TORCH,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(_QUERY_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return ()
    if process.returncode:
        return ()
    return [Gpu(accelerator=accelerator(name, size), memory_bytes=size) for name, size in json.loads(output)]

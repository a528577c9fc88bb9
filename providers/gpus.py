"""The GPUs of this machine, as a trainer started here would see them."""

import asyncio
import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PATIENCE_S = 120.0
_ASK_TORCH = """
import json, torch
found = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
print(json.dumps([[p.name, p.total_memory] for p in found]))
"""
_NAMES = (
    (r"H100.*NVL", "h100-nvl"), (r"H100.*PCIe", "h100-pcie"), (r"H100", "h100-sxm"), (r"H200", "h200-sxm"),
    (r"A100.*PCIE.*80GB|A100 80GB PCIe", "a100-80gb-pcie"), (r"A100.*80GB", "a100-80gb-sxm"), (r"A100", "a100-40gb"),
    (r"B200", "b200"), (r"L40S", "l40s"), (r"RTX 4090", "rtx4090"), (r"RTX A6000", "a6000"), (r"A10G", "a10g"),
    (r"\bL4\b", "l4"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Gpu:
    accelerator: str
    memory_bytes: int


def canonical(name: str) -> str:
    """The hardware table's name of a device as its driver calls it; a plain slug for one that it does not know."""
    for pattern, accelerator in _NAMES:
        if re.search(pattern, name):
            return accelerator
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ")).strip("-")


async def gpus() -> Sequence[Gpu]:
    """What torch sees, asked in a process of its own, because importing torch would cost the daemon seconds and memory.

    Empty without a driver, without torch, or with a torch that was built without support for the GPUs.
    """
    if shutil.which("nvidia-smi") is None and not Path("/dev/kfd").exists():
        return ()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", _ASK_TORCH,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(_PATIENCE_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return ()
    if process.returncode:
        return ()
    return [Gpu(accelerator=canonical(name), memory_bytes=size) for name, size in json.loads(output)]

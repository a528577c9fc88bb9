"""Canonical names of GPUs, from the names that clouds and drivers use."""

import re
from functools import lru_cache

GB = 10**9
_BY_NAME = (
    (r"H100.*NVL", "h100-nvl"), (r"H100.*PCI", "h100-pcie"), (r"H100", "h100-sxm"), (r"\bH200 NVL", "h200-nvl"),
    (r"\bH200", "h200-sxm"), (r"\bB200", "b200"), (r"L40S", "l40s"),
    (r"RTX ?4090(?! ?(D\b|Laptop|Mobile))", "rtx4090"), (r"RTX ?A6000|\bA6000\b", "a6000"),
    (r"A10G", "a10g"), (r"\bL4\b", "l4"),
)  # fmt: skip


@lru_cache(maxsize=4096)
def accelerator(name: str, memory_bytes: int | None) -> str:
    """Return the name in the hardware table, or a plain slug for an unknown GPU.

    The memory of one GPU distinguishes the two products named A100. If it is unknown, a size in the name does.
    """
    spelt = name.replace("_", " ")
    if re.search(r"A100", spelt, re.I):
        eighty = memory_bytes > 60 * GB if memory_bytes else bool(re.search(r"80 ?GB", spelt, re.I))
        return ("a100-80gb-pcie" if re.search(r"PCI", spelt, re.I) else "a100-80gb-sxm") if eighty else "a100-40gb"
    for pattern, known in _BY_NAME:
        if re.search(pattern, spelt, re.I):
            return known
    return re.sub(r"[^a-z0-9]+", "-", spelt.lower().removeprefix("nvidia ")).strip("-")

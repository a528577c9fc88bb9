"""Table that maps the GPU names of clouds, drivers and SkyPilot to the names of the hardware table.

A name counts only if every word of it is known, so `A100X`, `RTX A1000`, `RTX 4090 D` and MIG slices match no other
product. RunPod's ids, display names and Vast's `gpu_name` pass through the same table.
"""

import re
from functools import lru_cache

GB = 10**9
_NOISE = frozenset({
    "nvidia", "geforce", "tesla", "gpu", "tensor", "core", "hbm2", "hbm2e", "hbm3", "hbm3e", "gddr6", "gddr6x",
    "generation", "ac",
})  # fmt: skip
"""Words that do not distinguish products. `AC` marks an air-cooled B300."""
_FORM = re.compile(r"(sxm)\d*|(pci)e?x?|(nvl)")
_SIZE = re.compile(r"\d{1,4}gi?b")
_PRODUCTS = {
    "h100": "h100", "h200": "h200", "a100": "a100", "b200": "b200", "b300": "b300", "l40s": "l40s", "l40": "l40",
    "l4": "l4", "a10g": "a10g", "a10": "a10", "a40": "a40", "a30": "a30", "rtx 4090": "rtx4090", "4090": "rtx4090",
    "rtx4090": "rtx4090", "rtx a6000": "a6000", "a6000": "a6000", "rtxa6000": "a6000",
    "rtx 6000 ada": "rtx-6000-ada", "6000 ada": "rtx-6000-ada", "rtx 5000 ada": "rtx-5000-ada",
    "5000 ada": "rtx-5000-ada", "rtx pro 6000": "rtx-pro-6000", "rtx pro 6000 server edition": "rtx-pro-6000",
    "rtx pro 6000 s": "rtx-pro-6000", "pro 6000": "rtx-pro-6000",
}  # fmt: skip
"""Product by its words without noise, form and memory. Another product gets a slug of its words."""
_BOARDS = frozenset({"h100", "h200", "a100"})
"""Products that are sold on boards of different speed. On others the form does not distinguish: `B200 SXM6`."""
_MEMORY_GB = {
    "h100-sxm": (79, 96), "h100-pcie": (79, 96), "h100-nvl": (93, 102), "h200-sxm": (138, 152), "b200": (178, 196),
    "a100-80gb-sxm": (79, 87), "a100-80gb-pcie": (79, 87), "a100-40gb": (39, 44), "a100-40gb-pcie": (39, 44),
    "l40s": (44, 52), "rtx4090": (23, 52), "a6000": (47, 52), "a10g": (22, 26), "l4": (22, 26),
}  # fmt: skip
"""Possible memory of one GPU in decimal gigabytes, by accelerator.

The ranges allow for drivers' reserves and both readings of `GB`. An RTX 4090 has 24, or 48 if it was modified.
"""
_SLICE = re.compile(
    r"\bmig\b|\b\d+g\.?\d+gb\b|\b(grid|vgpu|virtual|vws|shared|fraction\w*|partition\w*|time-?sliced?)\b|"
    r"[ -](\d{1,2}[ab]|\d+[cq])$|\b(1/[2-9]|half|quarter)\b|(?<![\d.])0?\.\d+x?\b",
    re.I,
)
"""Names of MIG slices (`MIG 3g.40gb`), of virtual GPUs (`GRID A100-40C`, `L40S-48Q`) and of shares (`1/2 L40S`)."""
_VARIANT = re.compile(r"\b(laptop|mobile|max-?q|notebook|workstation|ws|wk)\b", re.I)
"""Laptop and workstation variants, which share the name of a faster product."""
_OTHER_MAKER = re.compile(
    r"\b(amd|instinct|radeon|mi\d{2,3}\w*|intel|gaudi\d*|habana|arc|flex|tpu|trainium\d*|inferentia\d*|neuron\w*|"
    r"ascend|huawei|qualcomm|cambricon|mlu\d+|mtt|kunlun\w*|hygon|dcu|xilinx|alveo|graphcore|ipu|groq|apple)\b",
    re.I,
)
_ARM = re.compile(r"\bG[BH]\d{2,3}|\b(grace|jetson|orin|thor|dgx spark)\b", re.I)
"""Superchips with ARM processors, for which no image exists. Lambda does not report the architecture."""


@lru_cache(maxsize=4096)
def accelerator(name: str, memory_bytes: int | None) -> str:
    """Return the name in the hardware table, or a plain slug for an unknown GPU.

    The memory of one GPU distinguishes the two products named A100. If it is unknown, a size in the name counts.
    """
    words = _words(name)
    forms = [match[1] or match[2] or match[3] for word in words if (match := _FORM.fullmatch(word))]
    sizes = [int(re.sub(r"\D", "", word)) for word in words if _SIZE.fullmatch(word)]
    rest = " ".join(w for w in words if w not in _NOISE and not _FORM.fullmatch(w) and not _SIZE.fullmatch(w))
    product = _PRODUCTS.get(rest)
    if product is None or _SLICE.search(name) or len(set(forms)) > 1 or len(set(sizes)) > 1:
        return "-".join(re.findall(r"[a-z0-9]+", " ".join(_slug_words(name))))
    if product not in _BOARDS:
        return product
    size = memory_bytes / GB if memory_bytes else float(sizes[0]) if sizes else None
    return _board(product, {"pci": "pcie"}.get(forms[0], forms[0]) if forms else "", size)


def _board(product: str, form: str, size: float | None) -> str:
    """Return the name of a product that is sold on several boards; `size`: memory in GB, None: unknown."""
    if product == "a100":
        low, high = _MEMORY_GB["a100-80gb-sxm"]
        if size is None or size <= _MEMORY_GB["a100-40gb"][1]:
            return "a100-40gb-pcie" if form == "pcie" else "a100-40gb"
        if low <= size <= high:
            return f"a100-80gb-{form or 'sxm'}"
        return f"a100-{size:.0f}gb"
    return f"{product}-{form or 'sxm'}"


def _words(name: str) -> list[str]:
    """Return the words of a name in lower case; `80 GB` and `80GB` are one word, `6000Ada` is two."""
    text = re.sub(r"\bpci-?e?(xpress)?\b", "pcie", name.lower().replace("_", " ").replace("pci-e", "pcie"))
    text = re.sub(r"\b(\d+)[ -]?g(i?b)\b", r"\1gb", text)
    text = re.sub(r"(\d)(ada)\b", r"\1 \2", text)
    return [word for word in re.findall(r"[a-z0-9.]+", text) if word != "blackwell" or "pro" not in text]


def _slug_words(name: str) -> list[str]:
    """Return the words of an unknown GPU's slug, without makers, so that an id and a display name agree."""
    return [word for word in _words(name) if word not in {"nvidia", "geforce", "tesla", "generation"}]


@lru_cache(maxsize=4096)
def name_fault(name: str) -> str | None:
    """Return why a GPU of this name cannot be sold, or None. Dropped rows are counted by this short reason."""
    spelt = name.replace("_", " ")
    if not re.search(r"[a-z0-9]", spelt, re.I):
        return "GPU without a name"
    if _SLICE.search(spelt):
        return "share of a GPU"
    if _OTHER_MAKER.search(spelt):
        return "not an NVIDIA GPU"
    if _ARM.search(spelt):
        return "ARM processor: the image is for x86-64"
    return "laptop or workstation variant of a GPU" if _VARIANT.search(spelt) else None


def memory_is_possible(name: str, memory_bytes: int) -> bool:
    """Return False if the memory of one GPU contradicts the accelerator's name."""
    low, high = _MEMORY_GB.get(name, (1, 1000))
    return low * GB <= memory_bytes <= high * GB

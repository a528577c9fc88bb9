"""GPUs that estimates know and jobs do not use: `gpubroker estimate --gpu` answers for them, no offer matches them.

Offers are matched by `hardware.TABLE` alone. Figures are those of vendors' data sheets, as `hardware` describes them.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from broker.domain.gpu_names import gpu_name, marketed_gb
from broker.estimator.speed.hardware import (
    FAST,
    GIB,
    HOPPER_ATTENTION,
    NVLINK4,
    NVLINK5,
    PCIE4,
    PCIE5,
    TABLE,
    Hardware,
    device,
    matches,
)
from trainer.contract.suggestions import close_matches

PCIE3, NVLINK2, INFINITY_FABRIC = 16e9, 150e9, 448e9
"""One direction: half of the data sheets' figures."""
HOPPER = 989.4 * HOPPER_ATTENTION

CARDS: Mapping[str, Hardware] = {
    h.name: h
    for h in (
        # NVIDIA's GA102 whitepaper 2.0: 35.6 TFLOP/s in fp32, 936 GB/s; with fp32 sums half of 142 TFLOP/s
        device("rtx-3090", 24e9 / GIB, 71.2, 35.6, 936, PCIE4),
        # spheron.network: 1792 GB/s, 838 TFLOP/s sparse with fp16 sums; a quarter is dense with fp32 sums
        device("rtx-5090", 32e9 / GIB, 209.5, 104.8, 1792, PCIE5),
        # NVIDIA's data sheet of the A10 [u]: 125 TFLOP/s dense; waredb.com: 31.2 TFLOP/s in fp32, 600 GB/s
        device("a10", 24e9 / GIB, 125.0, 31.2, 600, PCIE4),
        # hmc-tech.com: 149.7 and 37.4 TFLOP/s; gpu.spicedreamphone.com: 696 GB/s
        device("a40", 48e9 / GIB, 149.7, 37.4, 696, PCIE4),
        # mullet.se restates NVIDIA: 181.05 TFLOP/s dense (hmc-tech.com has 362), 90.5 in fp32, 864 GB/s
        device("l40", 48e9 / GIB, 181.05, 90.5, 864, PCIE4),
        # yottalabs.ai: 960 GB/s; [u] 364.25 TFLOP/s dense, a quarter of the data sheet's 1457 sparse in fp8
        device("rtx-6000-ada", 48e9 / GIB, 364.25, 91.1, 960, PCIE4),
        # gpu.name, topcpu.net: 96 GB, 1792 GB/s, 125 TFLOP/s, 4000 sparse in fp4, of which an eighth is dense in bf16;
        # the Max-Q edition is slower
        device("rtx-pro-6000", 96e9 / GIB, 500.0, 125.0, 1792, PCIE5),
        # koenli.com: 65 TFLOP/s in fp16 only, 8.1 in fp32, 300 GB/s
        device("t4", 16e9 / GIB, 65.0, 8.1, 300, PCIE3, bf16_works=False),
        # maosong.website, koenli.com: 125 TFLOP/s in fp16 only, 15.7 in fp32, 900 GB/s, NVLink 300 GB/s
        device("v100-16gb", 16e9 / GIB, 125.0, 15.7, 900, NVLINK2, bf16_works=False),
        device("v100-32gb", 32e9 / GIB, 125.0, 15.7, 900, NVLINK2, bf16_works=False),
        # [u] NVIDIA's data sheet: the H100's die with 96 GB at 4 TB/s, or 144 GB at 4.9 TB/s
        device("gh200-96gb", 96e9 / GIB, 989.4, 66.9, 4000, NVLINK4, attention=HOPPER, network=FAST),
        device("gh200-144gb", 144e9 / GIB, 989.4, 66.9, 4900, NVLINK4, attention=HOPPER, network=FAST),
        # glennklockwood.com: 288 GB, 8 TB/s, 2250 TFLOP/s dense, 75 in fp32; the network as fibermall.com has it
        device("b300", 288e9 / GIB, 2250.0, 75.0, 8000, NVLINK5, attention=2250 * HOPPER_ATTENTION, network=FAST),
        # rooflinenotes.dev, hmc-tech.com: 192 GB, 5.3 TB/s, 1307 and 163.4 TFLOP/s; memory only
        device("mi300x", 192e9 / GIB, 1307.4, 163.4, 5300, INFINITY_FABRIC, timed=False),
    )
}
KNOWN: Mapping[str, Hardware] = {**TABLE, **CARDS}
"""All devices for which memory is compared with an estimate."""

_NOISE = frozenset({
    "nvidia", "geforce", "tesla", "gpu", "tensor", "core", "generation", "blackwell", "server", "workstation",
    "edition", "amd", "instinct", "hbm2", "hbm3", "hbm3e", "gddr6", "gddr6x", "gddr7", "oam", "pcie", "sxm", "sxm2",
    "sxm3", "sxm6", "ac", "accelerator",
})  # fmt: skip
"""Words that do not distinguish these products."""
_SHORT_NAMES = {"3090": "rtx3090", "5090": "rtx5090", "6000ada": "rtx6000ada", "pro6000": "rtxpro6000"}
_HOST_GB = {"gh200": 480}
"""Memory in GB of the processor next to the GPU, which nvidia-smi has in the name: `NVIDIA GH200 480GB`."""


def _product(name: str) -> str:
    """Return a card's name without its memory and hyphens: the V100s are one product."""
    return re.sub(r"-\d+gb$", "", name).replace("-", "")


@lru_cache(maxsize=4096)
def candidates(name: str) -> tuple[Hardware, ...]:
    """Return all GPUs that a name may mean, the usual one first; none if a word of it is not understood."""
    canonical = gpu_name(name)
    listed = (
        [TABLE[canonical]] if canonical in TABLE else [h for known, h in TABLE.items() if matches(canonical, known)]
    )
    return tuple(listed) or _cards(re.sub(r"\b(\d+) ?-?gi?b\b", r"\1gb", name.lower().replace("_", " ")))


def _cards(name: str) -> tuple[Hardware, ...]:
    words = [word for word in re.findall(r"[a-z0-9]+", name) if word not in _NOISE]
    sizes = [int(word[:-2]) for word in words if re.fullmatch(r"\d+gb", word)]
    rest = "".join(word for word in words if not re.fullmatch(r"\d+gb", word))
    product = _SHORT_NAMES.get(rest, rest)
    variants = [h for known, h in CARDS.items() if _product(known) == product]
    if len(sizes) > 1 or not sizes or sizes == [_HOST_GB.get(product)]:
        return () if len(sizes) > 1 else tuple(variants)
    return tuple(h for h in variants if marketed_gb(h.name, h.memory_bytes) == sizes[0])


def no_speed(hardware: Hardware, precision: str) -> str | None:
    """Return why no speed is estimated on the GPU in the precision, or None if one is."""
    if not hardware.timed:
        return "no run on such a GPU was measured, so only its memory is used"
    if precision.startswith("bf16") and hardware.gpu and not hardware.bf16:
        return "computes in fp16, not in bf16; use the precision fp16-autocast"
    return None


def nearest(name: str) -> Sequence[str]:
    """Return at most one known GPU, the one with the most similar name."""
    return close_matches(name, [known for known, h in KNOWN.items() if h.gpu], n=1, cutoff=0.5)

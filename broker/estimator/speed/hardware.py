"""Published capabilities of GPUs: memory, arithmetic, bandwidth, links.

Peaks: dense bf16 with fp32 accumulation, fp32 without TF32, from NVIDIA's datasheets as restated by public pages. [u]
marks a figure from general knowledge that no page confirmed. `calibration` has the shares that training reaches.
"""

from dataclasses import dataclass
from functools import lru_cache

GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device; for `cpu` the rates are those of one core. FLOP/s and bytes/s."""

    name: str
    memory_bytes: int
    bf16_flops: float
    """The datasheet's rate."""
    matmul_flops: float
    """Rate of the fastest measured bf16 matrix product, or `UNMEASURED` of the datasheet's rate."""
    attention_flops: float
    """Rate of the fastest published fused causal attention in bf16, forward and backward, or `SCORES` of the peak."""
    fp32_flops: float
    bandwidth: float
    link: float
    """Rate to the other GPUs of its machine, one direction."""
    network: float
    """Rate into one machine, for all its GPUs together [assumed]."""
    bf16: bool = True
    gpu: bool = True
    timed: bool = True
    """False: only the memory is known well enough to be used."""


UNMEASURED = 0.80
"""Share of the datasheet's rate if no measured product is published: the median of the five measured (0.78 to 0.87)."""
SCORES = 0.65
"""FlashAttention-2 on an A100, 203 of 312 TFLOP/s [u]; it runs the same instructions on Ampere and Ada."""
NVLINK5, NVLINK4, NVLINK3, BRIDGE, PCIE5, PCIE4 = 900e9, 450e9, 300e9, 300e9, 64e9, 32e9
"""One direction: half of the datasheets' figures. BRIDGE: from an H100 NVL to one neighbour."""
FAST, SLOW = 200e9, 12.5e9
"""Rates into a machine: 1600 Gbit/s as clouds connect eight A100s or H100s, 100 Gbit/s for others [assumed]."""


def device(
    name: str, gib: float, bf16: float, fp32: float, gb_s: float, link: float, *,
    matmul: float | None = None, attention: float | None = None, network: float = SLOW, bf16_works: bool = True,
    timed: bool = True,
) -> Hardware:  # fmt: skip
    """Return a GPU of `gib` of memory. Rates are in TFLOP/s, `gb_s` in GB/s, `link` and `network` in bytes/s."""
    return Hardware(
        name=name,
        memory_bytes=int(gib * GIB),
        bf16_flops=bf16 * 1e12,
        matmul_flops=(matmul or UNMEASURED * bf16) * 1e12,
        attention_flops=(attention or SCORES * bf16) * 1e12,
        fp32_flops=fp32 * 1e12,
        bandwidth=gb_s * 1e9,
        link=link,
        network=network,
        bf16=bf16_works,
        timed=timed,
    )


HOPPER_ATTENTION = 335 / 989.4
"""FlashAttention-2 (arXiv 2307.08691) on an H100 SXM: 335 TFLOP/s [u] without Hopper's own instructions."""

TABLE: dict[str, Hardware] = {
    h.name: h
    for h in (
        # Measured products: the table "Maximum Achievable Matmul FLOPS" of stas00/ml-engineering (2025).
        # acecloud.ai, hmc-tech.com: 989.4 TFLOP/s, 3.35 TB/s, NVLink 900 GB/s
        device("h100-sxm", 80, 989.4, 66.9, 3350, NVLINK4, matmul=794.5, attention=335, network=FAST),
        # hmc-tech.com: 756.5 TFLOP/s; stas00/ml-engineering: 2.0 TB/s
        device("h100-pcie", 80, 756.5, 51.2, 2000, PCIE5, attention=756.5 * HOPPER_ATTENTION),
        # grokipedia.com: 94 GB, 3.93 TB/s; [u] 835 TFLOP/s
        device("h100-nvl", 94, 835.0, 60.0, 3900, BRIDGE, attention=835 * HOPPER_ATTENTION),
        # acecloud.ai: the H100's die with 141 GB at 4.8 TB/s, and the same matrix products
        device("h200-sxm", 141e9 / GIB, 989.4, 66.9, 4800, NVLINK4, matmul=794.5, attention=335, network=FAST),
        # acecloud.ai, hmc-tech.com: 312 TFLOP/s, 2039 GB/s, NVLink 600 GB/s
        device("a100-80gb-sxm", 80, 312.0, 19.5, 2039, NVLINK3, matmul=271.2, attention=203, network=FAST),
        # ai-hpc.github.io: 1935 GB/s
        device("a100-80gb-pcie", 80, 312.0, 19.5, 1935, PCIE4, matmul=252.9, attention=203),
        # hmc-tech.com: 312 TFLOP/s; a list of GPUs on huggingface.co: 1555 GB/s
        device("a100-40gb", 40, 312.0, 19.5, 1555, NVLINK3, matmul=271.2, attention=203, network=FAST),
        # the same over PCIe; 252.9 TFLOP/s were measured on the 80 GB board
        device("a100-40gb-pcie", 40, 312.0, 19.5, 1555, PCIE4, matmul=252.9, attention=203),
        # stas00/ml-engineering and mullet.se restate NVIDIA: 362 TFLOP/s dense, 864 GB/s; other pages say 183
        device("l40s", 48e9 / GIB, 362.05, 91.6, 864, PCIE4),
        # waredb.com: 165.2 TFLOP/s, 1008 GB/s
        device("rtx4090", 24e9 / GIB, 165.2, 82.6, 1008, PCIE4),
        # llmperf.net after Microway: 154.8 TFLOP/s; servethehome.com: 768 GB/s
        device("a6000", 48e9 / GIB, 154.8, 38.7, 768, PCIE4),
        # sysrqmts.com: 600 GB/s (the A10); [u] 70 TFLOP/s; a list on huggingface.co has 62.5
        device("a10g", 24e9 / GIB, 70.0, 31.5, 600, PCIE4),
        # fpsbench.com: 300 GB/s, 30.3 TFLOP/s in fp32, of which 121 are four times; hmc-tech.com has 125
        device("l4", 24e9 / GIB, 121.0, 30.3, 300, PCIE4),
        # stas00/ml-engineering: 2250 TFLOP/s, 1745 measured, 8 TB/s, 180 GB; other pages have 7.7 TB/s
        device(
            "b200", 180e9 / GIB, 2250.0, 75.0, 8000, NVLINK5, matmul=1745, attention=2250 * HOPPER_ATTENTION,
            network=FAST,
        ),
        # Effective rates of one core of an AMD EPYC with AVX-512. With them, LoRA on SmolLM2-135M trains the measured
        # 2.2 rows/s on two cores (r 16, all linear layers, rows of about 90 tokens, fp32).
        Hardware(
            name="cpu",
            memory_bytes=0,
            bf16_flops=92e9,
            matmul_flops=92e9,
            attention_flops=46e9,
            fp32_flops=92e9,
            bandwidth=10e9,
            link=1e9,
            network=1e9,
            bf16=False,
            gpu=False,
        ),
    )
}  # fmt: skip


_IMPLIED = {"a100-40gb": "sxm", "h100-sxm": "80gb", "h100-pcie": "80gb", "h100-nvl": "94gb"}
"""Parts that a name of the table lacks but a user may ask for."""


@lru_cache(maxsize=4096)
def matches(pattern: str, accelerator: str) -> bool:
    """Return whether `accelerator` matches the request; `a100`, `a100-80gb` and `a100-sxm` match all their variants."""
    wanted_parts, parts = pattern.split("-"), accelerator.split("-")
    return wanted_parts[0] == parts[0] and set(wanted_parts) <= {*parts, _IMPLIED.get(accelerator, parts[0])}

"""What a GPU can do: memory, arithmetic, bandwidth, and the share of it that training reaches.

Peaks: dense bf16 with fp32 accumulation, fp32 without TF32, NVIDIA's datasheets as restated by public pages.
[u] marks a figure from general knowledge that was not confirmed on a page. Efficiencies: see `throughput`.
"""

from dataclasses import dataclass

GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device; for `cpu` the rates are those of one core. FLOP/s and bytes/s."""

    name: str
    memory_bytes: int
    bf16_flops: float
    fp32_flops: float
    bandwidth: float
    link: float
    """Effective bytes/s of a gradient all-reduce between GPUs of one machine."""
    gemm_efficiency: float
    attention_efficiency: float
    spread: float
    """P90 of the step time / P50: 1.15 where the efficiencies were fitted, more where they were carried over."""
    bf16: bool = True
    gpu: bool = True


FITTED, CARRIED_OVER = 1.15, 1.5
NVLINK4, NVLINK3, PCIE5, PCIE4 = 350e9, 230e9, 40e9, 20e9
# Fitted on 209 llm-foundry rows (Apache-2.0, commit 8c8dd48): (GEMM, attention) as shares of the peak.
HOPPER, AMPERE = (0.766, 0.188), (0.912, 0.318)
# No multi-row measurement: carried over from Hopper, the less favourable of the two.
OTHER = HOPPER


def _gpu(
    name: str, gib: float, bf16: float, fp32: float, gb_s: float, link: float,
    efficiency: tuple[float, float], spread: float = CARRIED_OVER,
) -> Hardware:  # fmt: skip
    return Hardware(
        name=name,
        memory_bytes=int(gib * GIB),
        bf16_flops=bf16 * 1e12,
        fp32_flops=fp32 * 1e12,
        bandwidth=gb_s * 1e9,
        link=link,
        gemm_efficiency=efficiency[0],
        attention_efficiency=efficiency[1],
        spread=spread,
    )


TABLE: dict[str, Hardware] = {
    h.name: h
    for h in (
        # acecloud.ai, hmc-tech.com: 989.4 TFLOP/s, 3.35 TB/s, NVLink 900 GB/s
        _gpu("h100-sxm", 80, 989.4, 66.9, 3350, NVLINK4, HOPPER, FITTED),
        # hmc-tech.com: 756.5 TFLOP/s; 2.0 TB/s [u]
        _gpu("h100-pcie", 80, 756.5, 51.2, 2000, PCIE5, HOPPER),
        # [u] 835 TFLOP/s, 3.9 TB/s, 94 GB
        _gpu("h100-nvl", 94, 835.0, 60.0, 3900, PCIE5, HOPPER),
        # acecloud.ai: the H100's die with 141 GB at 4.8 TB/s
        _gpu("h200-sxm", 141e9 / GIB, 989.4, 66.9, 4800, NVLINK4, HOPPER),
        # acecloud.ai, hmc-tech.com: 312 TFLOP/s, 2039 GB/s, NVLink 600 GB/s
        _gpu("a100-80gb-sxm", 80, 312.0, 19.5, 2039, NVLINK3, AMPERE, FITTED),
        # ai-hpc.github.io: 1935 GB/s
        _gpu("a100-80gb-pcie", 80, 312.0, 19.5, 1935, PCIE4, AMPERE),
        # hmc-tech.com: 312 TFLOP/s; 1555 GB/s [u]
        _gpu("a100-40gb", 40, 312.0, 19.5, 1555, NVLINK3, AMPERE, FITTED),
        # mullet.se restates NVIDIA: 362 TFLOP/s dense, 864 GB/s; other pages say 183, so the spread matters
        _gpu("l40s", 48e9 / GIB, 362.05, 91.6, 864, PCIE4, OTHER),
        # waredb.com: 165.2 TFLOP/s, 1008 GB/s
        _gpu("rtx4090", 24e9 / GIB, 165.2, 82.6, 1008, PCIE4, OTHER),
        # [u] 154.8 TFLOP/s, 768 GB/s
        _gpu("a6000", 48e9 / GIB, 154.8, 38.7, 768, PCIE4, OTHER),
        # [u] 70 TFLOP/s, 600 GB/s
        _gpu("a10g", 24e9 / GIB, 70.0, 31.5, 600, PCIE4, OTHER),
        # [u] 121 TFLOP/s, 300 GB/s
        _gpu("l4", 24e9 / GIB, 121.0, 30.3, 300, PCIE4, OTHER),
        # [u] 2250 TFLOP/s, 8 TB/s, 180 GB
        _gpu("b200", 180e9 / GIB, 2250.0, 75.0, 8000, NVLINK4 * 2, OTHER),
        # Effective rates of one core of an AMD EPYC with AVX-512, set so that LoRA on SmolLM2-135M (r 16, all linear
        # layers, rows of about 90 tokens, fp32) trains the measured 2.2 rows/s on two cores. Cores differ: spread 2.
        Hardware(
            name="cpu",
            memory_bytes=0,
            bf16_flops=92e9,
            fp32_flops=92e9,
            bandwidth=10e9,
            link=1e9,
            gemm_efficiency=1.0,
            attention_efficiency=0.5,
            spread=2.0,
            bf16=False,
            gpu=False,
        ),
    )
}


def matches(asked: str, accelerator: str) -> bool:
    """Whether `accelerator` is what was asked for; `a100-80gb` and `a100` name all their variants."""
    return accelerator == asked or accelerator.startswith(asked + "-")

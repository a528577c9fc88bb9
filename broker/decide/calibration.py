"""What was fitted, and on what: shares of the published rates that training reaches."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Shares of the rates in the hardware table. `matmul`, `attention`: by GPU that has rows; `*_else`: of others."""

    matmul: Mapping[str, float]
    attention: Mapping[str, float]
    matmul_else: float
    attention_else: float
    bandwidth: float
    modules: float
    """Of the bandwidth, by what eager modules move; above 1 where the cache serves some of it."""
    within: float
    """Of NVLink or PCIe, one direction."""
    between: float
    """Of a machine's network."""
    exposed: float
    """Share of the messages that is never hidden."""
    hideable: float
    """Share of the computing that can hide messages."""
    sync_s: float
    """Per step and doubling of the devices."""

    def shares(self, gpu: str) -> tuple[float, float]:
        """(matmul, attention)."""
        return self.matmul.get(gpu, self.matmul_else), self.attention.get(gpu, self.attention_else)


FITTED = Calibration(
    matmul={"a100-40gb": 0.8550, "a100-80gb-sxm": 0.8948, "h100-sxm": 0.7843},
    attention={"a100-40gb": 0.4889, "a100-80gb-sxm": 0.4788, "h100-sxm": 0.5279},
    matmul_else=0.8541,
    attention_else=0.4946,
    bandwidth=0.8146,
    modules=1.2045,
    within=0.8,  # what nccl-tests show of NVLink's rate, so not fitted
    between=0.6651,
    exposed=0.4732,
    hideable=0.7,  # [assumed]: no row has that many messages
    sync_s=4.535e-3,
)
"""Fitted on 209 runs of llm-foundry, 4 of torchtitan and 19 of fms-acceleration (`python -m benchmarks.throughput_table
--fit`); `else` by a fit in which all GPUs share."""

SPREAD_MEASURED = 1.112
"""Conformal: nine of ten runs of transformers and torchtitan on GPUs of the fit are so far off at most, either way, by
fits that had not seen their method."""
SPREAD_UNMEASURED = 1.31
"""The worst of 237 rows by a fit without their architecture. Three architectures are too few for a quantile."""
SPREAD_CPU = 2.0
"""Processors differ by more than any share tells [assumed]; one was measured."""

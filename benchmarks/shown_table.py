"""Memory that nvidia-smi shows beyond the allocated peak, fitted and judged apart: `python -m benchmarks.shown_table`.

Every group of rows, a model with a method, is predicted by the share of the others. The margin of a group is the worst
shortfall of such predictions among those others, so no row influences its own margin. The last line is JSON.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.memory_table import FMS, fms_estimate, rows_of
from broker.estimator.memory.device_overhead import CONTEXT


@dataclass(frozen=True, kw_only=True)
class Row:
    """Bytes. `moving`: what comes and goes within a step."""

    group: tuple[str, str]
    gpus: int
    peak: int
    moving: int
    allocated: int
    shown: int

    @property
    def share(self) -> float:
        return (self.shown - CONTEXT - self.allocated) / self.moving

    def shortfall(self, share: float) -> float:
        """Return the part by which the shown memory exceeds the estimate with this share."""
        return self.shown / (self.peak + CONTEXT + share * self.moving) - 1


def rows() -> list[Row]:
    made = []
    for file, version in FMS.items():
        for row in rows_of(file):
            found = fms_estimate(row, version)
            by, peak = found["by_category"], found["peak_allocated_bytes"]
            method = "qlora" if "bnb" in row["framework_config"] else row["peft_method"] or "full"
            made.append(Row(
                group=(row["model_name_or_path"], method), gpus=int(row["num_gpus"]), peak=peak,
                moving=peak - by["weights"] - by["optimizer"],
                allocated=int(row["mem_peak_torch_mem_alloc_in_bytes"]),
                shown=int(row["mem_nvidia_mem_reserved"]) * 2**20,
            ))  # fmt: skip
    return made


def share_of(given: Sequence[Row]) -> float:
    return statistics.median(row.share for row in given)


def others(given: Sequence[Row], group: tuple[str, str]) -> list[Row]:
    return [row for row in given if row.group != group]


def left_out(given: Sequence[Row]) -> list[float]:
    """Return shortfalls of all rows, each group's by the share of the others."""
    return [row.shortfall(share_of(others(given, row.group))) for row in given]


def main() -> None:
    """Print shares, errors and coverage of one GPU and of several."""
    document: dict[str, dict[str, float]] = {}
    found = rows()
    for name, several in (("one_gpu", False), ("several", True)):
        given = [row for row in found if (row.gpus > 1) == several]
        short, covered = left_out(given), 0
        for row, shortfall in zip(given, short, strict=True):
            covered += shortfall <= max(left_out(others(given, row.group)))
        errors = [abs(1 / (1 + s) - 1) for s in short]
        document[name] = {
            "n": len(given),
            "share": round(share_of(given), 3),
            "left_out_median_abs_pct": round(100 * statistics.median(errors), 1),
            "left_out_max_abs_pct": round(100 * max(errors), 1),
            "worst_shortfall_pct": round(100 * max(short), 1),
            "covered_by_the_others_margin": covered,
        }
        print(name, document[name])
    print(json.dumps(document))


if __name__ == "__main__":
    main()

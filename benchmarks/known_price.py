"""A price that users know, by the functions that quotes call: Mistral-7B, 1,500 samples, QLoRA, one L40S at $2.75 an
hour takes about 10 minutes and $0.45. Nobody says how long the samples are, so several lengths are shown."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

from broker.decide import estimate as sizes
from broker.decide.fit import Fit
from broker.decide.hardware import TABLE
from broker.decide.quote_kinds import kind_of
from broker.decide.scaling import Load, run_of, scaling
from broker.decide.throughput import pace, timing
from broker.domain.instance import Caps
from broker.domain.money import usd
from broker.domain.offer import Offer
from broker.domain.workload import Workload
from broker.models import catalogue
from broker.models.shape import shape_of

MINUTES, USD, USD_PER_HOUR = 10.0, 0.45, 2.75
SAMPLES, GLOBAL_BATCH, BOOT_S = 1500, 16, 120.0
TOKENS = 512
"""Of a row [assumed]: `train.max_length`'s default, with every row padded to it."""
LENGTHS = (128, 256, 384, 512, 640, 768)
ASSUMED = (
    f"rows of {TOKENS} tokens, one epoch, {GLOBAL_BATCH} rows a step, rank 16 on all linear modules, no evaluation",
    f"{BOOT_S:.0f} s from create to the first beat, weights at 200 MB/s, billed by the second from the create",
)


@dataclass(frozen=True, kw_only=True)
class Known:
    """Minutes and dollars, P50 and P90, set-up included."""

    minutes: tuple[float, float]
    usd: tuple[float, float]

    @property
    def contains(self) -> bool:
        """The known figures lie between P50² / P90, as far below P50 as P90 is above it, and P90."""
        return all(
            p50 * p50 / p90 <= known <= p90 for (p50, p90), known in ((self.minutes, MINUTES), (self.usd, USD))
        )  # fmt: skip


def known(tokens: int = TOKENS) -> Known:
    """The job with rows of so many tokens."""
    found, gpu = catalogue.find("mistralai/Mistral-7B-v0.1"), TABLE["l40s"]
    assert found is not None
    shape, steps = shape_of("mistral", found.config), -(-SAMPLES // GLOBAL_BATCH)
    ask = sizes.Ask(method="qlora", precision="bf16-autocast", length=tokens)
    load = Load(global_batch=GLOBAL_BATCH, tokens_per_row=tokens, steps=steps)
    plan = scaling(shape, ask, gpu, (1,), load)[0].plan
    assert plan is not None
    work = Workload(
        shape=shape, method="lora", micro_batch=plan.micro_batch, global_batch=GLOBAL_BATCH, sequence=tokens,
        tokens_per_row=tokens, steps=steps,
    )  # fmt: skip
    offer = Offer(
        id="l40s", provider="cloud", cloud="Cloud", region="eu", instance_type="1xL40S", accelerator="l40s", gpus=1,
        gpu_memory_bytes=gpu.memory_bytes, vcpus=16, ram_bytes=2**36, disk_bytes=10**12, spot=False,
        usd_per_hour=usd(Decimal(str(USD_PER_HOUR))), seen_at=datetime(2026, 1, 1, tzinfo=UTC),
    )  # fmt: skip
    times = pace(work, timing(run_of(shape, ask, plan, tokens), gpu))
    kind = kind_of(
        work, offer, Fit(drop=None, reason="", pace=times, plan=plan), Caps(spot=False, boot_s=BOOT_S), (None, ""),
        nodes=1, storage_usd_per_gib_month=0.0,
    )  # fmt: skip
    p50, p90 = kind.p50(0.0), kind.p90(0.0, 1.0)
    return Known(
        minutes=(p50 / 60, p90 / 60), usd=(USD_PER_HOUR * kind.billed(p50), USD_PER_HOUR * kind.billed(p90))
    )  # fmt: skip


def main() -> None:
    """Prints the assumptions, a line for each length, and one JSON line."""
    for line in ASSUMED:
        print(f"assumed: {line}")
    for tokens in LENGTHS:
        found = known(tokens)
        (m50, m90), (u50, u90) = found.minutes, found.usd
        inside = "contains" if found.contains else "does not contain"
        print(f"{tokens:5} tokens a row: {m50:5.1f} – {m90:4.1f} min, ${u50:.2f} – ${u90:.2f}; {inside} 10 min, $0.45")
    found = known()
    print(json.dumps({"tokens": TOKENS, "minutes": found.minutes, "usd": found.usd, "contains": found.contains}))


if __name__ == "__main__":
    main()

"""Measure one quote over a whole market: `python -m benchmarks.quote --offers 50000`. The last line is JSON.

`first_cpu_ms`: the first quote after a poll of the clouds, which builds the index; `cpu_ms`: any later quote.
"""

import argparse
import json
import random
import statistics
import time
from datetime import UTC, datetime
from decimal import Decimal

from broker.domain.instance import Caps
from broker.domain.offer import Offer, Quote
from broker.domain.spec import JobSpec
from broker.domain.workload import ModelShape, Workload
from broker.estimator.speed.hardware import TABLE
from broker.quote.engine import quote
from broker.quote.summary import summary

PROVIDERS = tuple(f"cloud{n}" for n in range(8))
LLAMA_3_8B = ModelShape(
    name="meta-llama/Llama-3.1-8B", family="llama", layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8,
    head_dim=128, vocabulary=128256, tied_embeddings=False, parameters=8_030_261_248, known=True,
)  # fmt: skip
SPEC = JobSpec.model_validate(
    {
        "name": "benchmark",
        "cap_usd": "400",
        "train": {"model": LLAMA_3_8B.name, "data": {"path": "rows.csv", "completion": "{text}"}},
        "resources": {"max_usd_per_hour": "40"},
    }
)
WORK = Workload(
    shape=LLAMA_3_8B, method="lora", lora_r=16, gradient_checkpointing=True, micro_batch=1, global_batch=32,
    sequence=2048, tokens_per_row=900, steps=2000, eval_rows=2000,
)  # fmt: skip


def market(count: int, now: datetime) -> tuple[Offer, ...]:
    """Return a seeded market: every GPU type in 1 to 8 pieces, 8 clouds, 40 regions, spot and on-demand."""
    rng = random.Random(17)
    gpus = [h for h in TABLE.values() if h.gpu]
    offers = []
    for n in range(count):
        h, pieces, spot = rng.choice(gpus), rng.choice((1, 2, 4, 8)), rng.random() < 0.5
        on_demand = Decimal(rng.randrange(20, 600) * pieces) / 100
        price = (on_demand * rng.randrange(20, 105) / 100).quantize(Decimal("0.0001")) if spot else on_demand
        provider, region = rng.choice(PROVIDERS), f"region-{rng.randrange(40)}"
        offer = Offer(
            id=f"{provider}/{region}/{pieces}x{h.name}/{n}", provider=provider, cloud=provider, region=region,
            instance_type=f"{pieces}x{h.name}", accelerator=h.name, gpus=pieces, gpu_memory_bytes=h.memory_bytes,
            vcpus=8 * pieces, ram_bytes=64 * 2**30 * pieces, disk_bytes=10**12, spot=spot, usd_per_hour=price,
            on_demand_usd_per_hour=on_demand, available=rng.choice((None, True, True, False)),
            preemptions_per_hour=rng.choice((None, rng.random())) if spot else None, seen_at=now,
        )  # fmt: skip
        offers.append(offer)
    return tuple(offers)


def timed(offers: tuple[Offer, ...], now: datetime) -> tuple[Quote, float, float]:
    """Return (quote, milliseconds, CPU milliseconds) of a quote with its first 100 lines."""
    caps = {name: Caps(spot=True) for name in PROVIDERS}
    start, cpu = time.perf_counter(), time.process_time()
    result = quote(
        SPEC, WORK, offers, now=now, local_files=False, scoped_store=True, spent=Decimal(0), cap_left=SPEC.cap_usd,
        excluded={}, caps=caps,
    )  # fmt: skip
    tuple(result.lines[:100])
    return result, (time.perf_counter() - start) * 1000, (time.process_time() - cpu) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--offers", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    now = datetime.now(UTC)
    offers = market(args.offers, now)
    timed(offers, now)
    firsts = [timed((*offers,), now) for _ in range(args.repeats)]
    runs = [timed(offers, now) for _ in range(args.repeats)]
    times, result = sorted(run[1] for run in runs), runs[-1][0]
    start = time.perf_counter()
    tuple(result.lines)
    every = (time.perf_counter() - start) * 1000
    print(summary(result))
    best = result.best
    if best is not None:
        print(f"best: {best.offer.id} at ${best.offer.usd_per_hour}/h, ${best.usd_p50} expected to finish")
    print(f"quote and first 100 lines: median {statistics.median(times):.0f} ms; every line: {every:.0f} ms more")
    figures = {
        "offers": args.offers,
        "ms": round(statistics.median(times), 1),
        "cpu_ms": round(statistics.median(run[2] for run in runs), 1),
        "first_cpu_ms": round(statistics.median(run[2] for run in firsts), 1),
        "ms_best": round(times[0], 1),
        "ms_worst": round(times[-1], 1),
        "all_lines_ms": round(every, 1),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

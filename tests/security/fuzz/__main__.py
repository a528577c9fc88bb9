"""Feeds changed files to every parser of untrusted data: `python -m tests.security.fuzz --cases 100000`.

Each case is one valid file after random changes. A crash is an exception that is not a refusal, or the end of the
process by a signal. A stall is a case of more than 250 ms of CPU time in a parser that the daemon calls on its
event loop. A case that reaches the daemon's own limit of CPU time counts as slow: the daemon ends such a parser and
refuses the file. The last line is JSON. `--replay FILE --target NAME` runs one kept case. Batches run in processes
of their own, because a native parser that aborts ends its process.
"""

import argparse
import asyncio
import hashlib
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from types import FrameType

from broker.preflight.parse_worker import MEMORY_BYTES
from tests.security.fuzz.mutations import mutate
from tests.security.fuzz.seeds import seeds
from tests.security.fuzz.targets import TARGETS, Target

STALL_S = 0.25
BATCH = 1000


class TooSlow(BaseException):
    """The case used all CPU seconds of its target. No parser catches it."""


def case(seed: int, number: int) -> tuple[str, bytes]:
    """Return the target's name and the file of a case, the same for the same numbers."""
    rng = random.Random(f"{seed}/{number}")
    name = sorted(TARGETS)[number % len(TARGETS)]
    return name, mutate(rng, rng.choice(seeds()[name]))


def run_case(target: Target, data: bytes) -> tuple[str, str]:
    """Return the outcome (ok, refused, slow, stall, crash) and details of a crash or stall."""
    began, outcome, details = time.thread_time(), "ok", ""
    signal.setitimer(signal.ITIMER_PROF, target.limits_s)
    try:
        target.run(data)
    except target.refusals:
        outcome = "refused"
    except TooSlow:
        outcome = "slow"
    except Exception:
        outcome, details = "crash", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    took_s = time.thread_time() - began
    if target.on_loop and took_s > STALL_S and outcome != "crash":
        return "stall", f"{took_s:.2f} s"
    return outcome, details


def _stop(_: int, __: FrameType | None) -> None:
    raise TooSlow


def batch(seed: int, first: int, count: int) -> None:
    """Run cases, and print a line before each one and another one with its outcome if it is a fault."""
    signal.signal(signal.SIGPROF, _stop)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    counts: Counter[str] = Counter()
    for number in range(first, first + count):
        name, data = case(seed, number)
        print(json.dumps({"at": number}), flush=True)
        outcome, details = run_case(TARGETS[name], data)
        counts[f"{name} {outcome}"] += 1
        if details:
            print(json.dumps({"fault": number, "target": name, "outcome": outcome, "details": details}), flush=True)
    print(json.dumps({"counts": counts}), flush=True)


class Fuzz:
    """Runs batches in processes, collects faults, and keeps the file of each distinct one."""

    def __init__(self, seed: int, cases: int, kept: Path) -> None:
        self._seed, self._cases, self._kept = seed, cases, kept
        self._next = 0
        self.counts: Counter[str] = Counter()
        self.seen: set[str] = set()

    async def work(self) -> None:
        """Run batches until none is left."""
        while self._next < self._cases:
            first, count = self._next, min(BATCH, self._cases - self._next)
            self._next += count
            end = first + count
            while first < end:
                first = await self._batch(first, end)
            print(f"{self._next} of {self._cases} cases, {self.faults()} faults", flush=True)

    async def _batch(self, first: int, end: int) -> int:
        """Run cases from `first` on and return the number of the first that did not run."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.security.fuzz", "--seed", str(self._seed), "--batch", str(first),
            str(end - first), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, limit=1 << 24,
        )  # fmt: skip
        assert process.stdout is not None
        at, is_done = first, False
        async for line in process.stdout:
            message = json.loads(line)
            at = message.get("at", at)
            if "fault" in message:
                self._keep(message["fault"], message["outcome"], message["details"])
            if "counts" in message:
                self.counts.update(message["counts"])
                is_done = True
        code = await process.wait()
        if is_done:
            return end
        name, _ = case(self._seed, at)
        self.counts[f"{name} crash"] += 1
        self._keep(at, "crash", f"the process ended with {code}")
        return at + 1

    def _keep(self, number: int, outcome: str, details: str) -> None:
        name, data = case(self._seed, number)
        kind = f"{name} {outcome} {details.strip().splitlines()[-1][:80]}"
        if kind in self.seen:
            return
        self.seen.add(kind)
        self._kept.mkdir(parents=True, exist_ok=True)
        file = self._kept / f"{name}-{outcome}-{hashlib.sha256(data).hexdigest()[:12]}"
        file.write_bytes(data)
        print(f"case {number}: {kind}\n{details}\nkept: --replay {file} --target {name}", flush=True)

    def of(self, outcome: str) -> int:
        """Return the number of cases with an outcome."""
        return sum(count for key, count in self.counts.items() if key.endswith(f" {outcome}"))

    def faults(self) -> int:
        """Return the number of crashes and stalls."""
        return self.of("crash") + self.of("stall")


async def fuzz(seed: int, cases: int, kept: Path) -> Fuzz:
    """Run `cases` cases on all cores."""
    run = Fuzz(seed, cases, kept)
    await asyncio.gather(*(run.work() for _ in range(os.cpu_count() or 1)))
    return run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.security.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kept", type=Path, default=Path("/tmp/gpubroker-fuzz"), help="folder of the failing files")
    parser.add_argument("--batch", type=int, nargs=2, metavar=("FIRST", "COUNT"), help=argparse.SUPPRESS)
    parser.add_argument("--replay", type=Path, metavar="FILE")
    parser.add_argument("--target", choices=sorted(TARGETS))
    args = parser.parse_args()
    if args.batch:
        batch(args.seed, *args.batch)
        return 0
    if args.replay:
        signal.signal(signal.SIGPROF, _stop)
        outcome, details = run_case(TARGETS[args.target], args.replay.read_bytes())
        print(f"{outcome}\n{details}")
        return 1 if details else 0
    run = asyncio.run(fuzz(args.seed, args.cases, args.kept))
    for name in sorted(TARGETS):
        print(name, {o: run.counts[f"{name} {o}"] for o in ("ok", "refused", "slow", "stall", "crash")})
    print(
        json.dumps({"cases": args.cases, "crashes": run.of("crash"), "stalls": run.of("stall"), "slow": run.of("slow")})
    )
    return 1 if run.faults() else 0


if __name__ == "__main__":
    sys.exit(main())

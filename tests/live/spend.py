"""Scenarios on real clouds, for money: `python -m tests.live --max-usd 2 --yes-spend-money --cloud runpod …`.

A real cloud cannot be ordered to preempt, to sell out, or to change a price or a GPU. The emulators in
tests/clouds/scenarios cover these cases. A preemption is simulated by destroying the machine without the daemon.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import ROUND_DOWN, Decimal
from pathlib import Path
from typing import Any

import yaml

from broker.api.schemas.jobs import JobDetail
from broker.domain.errors import ProviderError
from broker.domain.job import AttemptState, JobState
from tests.live.balance import balance
from tests.live.installation import LiveInstallation, sweep
from tests.live.look import missing

HUB = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
DATA = Path("examples/devils-dictionary.csv")
CENT = Decimal("0.01")
LEAST_CAP = Decimal("0.10")
"""A share below this buys nothing."""
LAUNCH_S, RUN_S, NOTICE_S = 3600.0, 5400.0, 120.0
SLACK_USD = Decimal("0.05")
"""Allowed excess of the fall of an account's balance over our ledger, for charges that we do not count and rounding."""


@dataclass(kw_only=True)
class Report:
    """Result of a run."""

    scenarios: dict[str, str] = field(default_factory=dict)
    """`ok` or the failure, by `<cloud>/<scenario>`."""
    seconds: dict[str, float] = field(default_factory=dict)
    spent_usd: Decimal | None = None
    fell_usd: dict[str, str] = field(default_factory=dict)
    """Fall of the account's balance by cloud, if the cloud reports it."""
    left: dict[str, str] = field(default_factory=dict)
    """Reason by cloud for every cloud where a machine of the run exists or may exist."""

    @property
    def ok(self) -> bool:
        return not self.left and bool(self.scenarios) and all(scenario == "ok" for scenario in self.scenarios.values())


Scenario = Callable[[LiveInstallation, str, Decimal], Awaitable[None]]


def job(cloud: str, cap: Decimal, *, steps: int) -> Mapping[str, Any]:
    """Return the fine-tune of the emulated scenarios, on one cloud and under a cap."""
    from tests.clouds.scenarios.scene import fine_tune

    limits = {"providers": [cloud], "gpus": 1}
    return fine_tune(HUB, steps=steps, cap_usd=str(cap), resources=limits, checkpoint={"every_s": 20})


async def fine_tuned(installation: LiveInstallation, cloud: str, cap: Decimal) -> None:
    """Run a job from submit to its end, and require that no machine is left."""
    name = await installation.submit(job(cloud, cap, steps=20), DATA)
    await installation.until(name, "fine-tuned", _succeeded, within_s=RUN_S)
    await _nothing_stands(installation, cloud)


async def taken(installation: LiveInstallation, cloud: str, cap: Decimal) -> None:
    """Destroy the training machine by the cloud's own API; the job must resume on another one."""
    name = await installation.submit(job(cloud, cap, steps=400), DATA)
    await installation.until(name, "training with a checkpoint behind it", _well_under_way, within_s=LAUNCH_S)
    for machine in await installation.machines(cloud):
        await installation.native(cloud).destroy(machine.handle)
    await installation.until(name, "noticed", lambda d: d.runs[0].state is not AttemptState.TRAINING, within_s=NOTICE_S)
    detail = await installation.until(name, "resumed to its end", _succeeded, within_s=RUN_S)
    assert len(detail.runs) >= 2, "it succeeded without a second attempt"
    assert detail.runs[1].resume_from, "the second attempt began from zero"
    await _nothing_stands(installation, cloud)


async def killed(installation: LiveInstallation, cloud: str, cap: Decimal) -> None:
    """Kill the daemon and its SkyPilot server during a launch; no name may have two machines."""
    name = await installation.submit(job(cloud, cap, steps=20), DATA)
    await installation.until(name, "a launch", lambda d: any(run.create_sent_at for run in d.runs), within_s=LAUNCH_S)
    await installation.kill()
    await installation.start()
    watch = asyncio.create_task(_never_two(installation, cloud))
    try:
        await installation.until(name, "succeeded after the restart", _succeeded, within_s=RUN_S)
    finally:
        watch.cancel()
    if (failed := (await asyncio.gather(watch, return_exceptions=True))[0]) and isinstance(failed, AssertionError):
        raise failed
    await _nothing_stands(installation, cloud)


SCENARIOS: Mapping[str, Scenario] = {"fine-tuned": fine_tuned, "taken": taken, "killed": killed}


def _succeeded(detail: JobDetail) -> bool:
    return detail.state is JobState.SUCCEEDED


def _well_under_way(detail: JobDetail) -> bool:
    """Return True if a checkpoint was probably committed, from which a second attempt would resume."""
    run = detail.runs[-1] if detail.runs else None
    if run is None or run.state is not AttemptState.TRAINING or run.beat is None or run.first_beat_at is None:
        return False
    return (datetime.now(UTC) - run.first_beat_at).total_seconds() > 120 and (run.beat.step or 0) > 5


async def _nothing_stands(installation: LiveInstallation, cloud: str) -> None:
    async with asyncio.timeout(300):
        while await installation.machines(cloud):  # noqa: ASYNC110
            await asyncio.sleep(5)


async def _never_two(installation: LiveInstallation, cloud: str) -> None:
    while True:
        try:
            names = [machine.handle.name for machine in await installation.machines(cloud)]
        except ProviderError:
            names = []
        assert len(names) == len(set(names)), f"two machines of one name: {names}"
        await asyncio.sleep(5)


# ----------------------------------------------------------------------------------------------------------- the run


def begin(clouds: list[str], max_usd: Decimal, config: Path, scenarios: list[str]) -> int:
    """Return exit code 0 if all went well and no machine is left, 1 if not, 2 if nothing was begun."""
    problem = refusal(clouds, max_usd, config, scenarios)
    if problem:
        print(f"tests.live: {problem}; nothing was begun", file=sys.stderr)
        return 2
    home = Path.home() / ".local/state/gpubroker-live" / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    installation = LiveInstallation(home, clouds, yaml.safe_load(config.read_text()) or {})
    report = asyncio.run(run(installation, share(max_usd, clouds, scenarios), scenarios))
    document = {
        "scenarios": report.scenarios, "seconds": report.seconds, "orphans": report.left,
        "spent_usd": None if report.spent_usd is None else str(report.spent_usd), "balance_fell_usd": report.fell_usd,
        "ok": report.ok,
    }  # fmt: skip
    print(json.dumps(document))
    return 0 if report.ok else 1


def refusal(clouds: list[str], max_usd: Decimal, config: Path, scenarios: list[str]) -> str:
    """Return the reason why a run cannot begin; empty: it may begin."""
    if unknown := [name for name in scenarios if name not in SCENARIOS]:
        return f"there is no scenario {unknown[0]}; one of {', '.join(SCENARIOS)}"
    if (cap := share(max_usd, clouds, scenarios)) < LEAST_CAP:
        return f"--max-usd {max_usd} leaves each job ${cap}, less than ${LEAST_CAP}: name fewer clouds or scenarios"
    try:
        given = yaml.safe_load(config.read_text()) or {}
    except (OSError, yaml.YAMLError) as e:
        return f"--config {config}: {str(e).splitlines()[0]}"
    if not str(given.get("blobs", "")).startswith(("s3://", "gs://", "az://")):
        return f"--config {config}: `blobs` must be a bucket, which rented machines can reach"
    return next(filter(None, (missing(cloud, *_user()) for cloud in clouds)), "")


def _user() -> tuple[Mapping[str, str], Path]:
    return os.environ, Path.home()


def share(max_usd: Decimal, clouds: list[str], scenarios: list[str]) -> Decimal:
    """Return the cap of each job, so that all jobs together stay below `max_usd`."""
    return (max_usd / (len(clouds) * len(scenarios))).quantize(CENT, rounding=ROUND_DOWN)


async def run(installation: LiveInstallation, cap: Decimal, scenarios: list[str]) -> Report:
    """Run the scenarios one after the other. At the end, even after an error, all machines are destroyed and searched
    for.
    """
    report = Report()
    me = asyncio.current_task()
    assert me is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
    before = {cloud: await balance(cloud, *_user(), installation.endpoint(cloud)) for cloud in installation.clouds}
    try:
        await installation.start()
        print(f"installation {installation.installation}, home {installation.home}; each job's cap is ${cap}")
        print(f"if this is killed: GPUBROKER_HOME={installation.home} gpubroker sweep --once --destroy", flush=True)
        for cloud in installation.clouds:
            for name in scenarios:
                await _try(report, f"{cloud}/{name}", SCENARIOS[name](installation, cloud, cap))
    except asyncio.CancelledError:
        report.scenarios["run"] = "interrupted"
    except (RuntimeError, TimeoutError) as e:
        report.scenarios["run"] = str(e) or "the daemon did not start in time"
    finally:
        await asyncio.shield(_end(installation, report))
    for cloud, had in before.items():
        await _compare(report, installation, cloud, had)
    return report


async def _try(report: Report, name: str, scenario: Awaitable[None]) -> None:
    begun = time.monotonic()
    print(f"{name} …", flush=True)
    try:
        await scenario
        report.scenarios[name] = "ok"
    except Exception as e:  # the next scenario is another matter
        report.scenarios[name] = f"{type(e).__name__}: {e}"
    report.seconds[name] = round(time.monotonic() - begun, 1)
    print(f"{name}: {report.scenarios[name]} ({report.seconds[name]} s)", flush=True)


async def _end(installation: LiveInstallation, report: Report) -> None:
    """Cancel the jobs, count, stop the daemon, then sweep, because no launch can follow the sweep then."""
    if not (installation.home / "installation").exists():
        return  # no daemon ever was, so nothing could be rented
    try:
        await installation.cancel_all()
        report.spent_usd = await installation.spent()
        print(f"spent by our ledger: ${report.spent_usd}")
    except Exception as e:  # the sweep must run, even if the daemon fails
        print(f"  {type(e).__name__}: {e}")
    await installation.stop()
    report.left = await sweep(installation)
    for cloud, why in report.left.items():
        print(f"ATTENTION: at {cloud} machines of installation {installation.installation} may stand and bill: {why}")
    await installation.close()


async def _compare(report: Report, installation: LiveInstallation, cloud: str, had: Decimal | None) -> None:
    """Report a balance above our ledger only, because an account may have other costs."""
    now = await balance(cloud, *_user(), installation.endpoint(cloud))
    if had is None or now is None:
        report.fell_usd[cloud] = "its API does not tell"
        return
    fell = had - now
    report.fell_usd[cloud] = str(fell)
    if report.spent_usd is not None and fell > report.spent_usd + SLACK_USD:
        report.scenarios[f"{cloud}/bill"] = f"the balance fell by ${fell}, our ledgers say ${report.spent_usd}"

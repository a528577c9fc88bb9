"""An operator's view of machines without a record, on the host of real daemons and from elsewhere."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from broker.cli.main import app
from broker.domain.ids import Installation, InstanceName
from tests.cli.conftest import Ran
from tests.crash.daemon_rig import DaemonRig
from tests.crash.gate import Point
from tests.crash.hardships import MARK
from tests.crash.loopback_cloud import LAG_S, NAME, LoopbackProvider, SoldMachine
from tests.crash.services import BUCKET, ENDPOINT, KEYS, SharedServices, open_services
from tests.crash.supervised_daemon import POLL_S
from tests.crash.waits import Within

STRAY = "a" * 13
ENDS = ("--destroy", "--yes")


@pytest.fixture(scope="module")
async def services() -> AsyncIterator[SharedServices]:
    async with open_services() as services:
        yield services


@pytest.fixture(autouse=True)
def clouds(services: SharedServices, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the loopback cloud available to the command line."""

    def build(*_: Any, installation: Installation, state: Path, **__: Any) -> dict[str, LoopbackProvider]:
        return {NAME: LoopbackProvider(services.cloud.url, installation, state / NAME)}

    monkeypatch.setattr("providers.registry.build", build)
    for name in ("GPUBROKER_URL", "GPUBROKER_TOKEN"):
        monkeypatch.delenv(name, raising=False)


async def run(home: Path, *words: str) -> Ran:
    def invoke() -> Any:
        return CliRunner().invoke(app, [*words, "--json"], env={"GPUBROKER_HOME": str(home)}, catch_exceptions=False)

    done = await asyncio.to_thread(invoke)
    return Ran(code=done.exit_code, out=done.stdout, err=done.stderr)


def buy_by_hand(services: SharedServices, name: str) -> SoldMachine:
    """Sell a machine that a user bought by hand."""
    sold_machine = SoldMachine(id=name, name=InstanceName(name), attempt=name.rsplit("-", 1)[-1], born=0.0)
    services.cloud.sold[name] = sold_machine
    return sold_machine


async def gone(sold: SoldMachine) -> None:
    """Wait until the machine is destroyed and no listing shows it."""
    async with Within(300, f"{sold.id} is gone"):
        while time.monotonic() < sold.destroyed + LAG_S:  # noqa: ASYNC110 - another process destroys it
            await asyncio.sleep(POLL_S)


async def working(rig: DaemonRig) -> SoldMachine:
    """Return a machine of the job that stays, because its destroys fail."""
    rig.daemon.gate.hold_at = Point(name="cloud:destroy", number=1, moment="before")
    rig.daemon.gate.hold = asyncio.Event().wait
    rig.daemon.start()
    await rig.submit()
    async with Within(300, "a machine is bought", rig.daemon.status_message):
        while not rig.services.cloud.alive(rig.installation):  # noqa: ASYNC110 - another process buys it
            await asyncio.sleep(POLL_S)
    return rig.services.cloud.alive(rig.installation)[0]


async def test_orphan_is_reported_and_swept_and_lookalikes_are_spared(services: SharedServices) -> None:
    async with DaemonRig(services) as rig:
        mine, home = f"gb-{rig.installation}-{STRAY}", rig.daemon.home
        twisted = [f"{mine}-copy", mine.upper(), f"{mine}b", mine[:-1], f"my{mine}", mine.replace("-", "_")]
        twisted.append(f"gb-{'z' * len(rig.installation)}-{STRAY}")
        foreign = [buy_by_hand(services, name) for name in twisted]
        orphan = buy_by_hand(services, mine)
        report = await run(home, "doctor", "--orphans")
        assert (report.code, [one["name"] for one in report.document["orphans"]]) == (1, [mine])
        rig.daemon.start()
        await gone(orphan)
        clean = await run(home, "doctor", "--orphans")
        assert (clean.code, clean.document["orphans"]) == (0, [])
        swept = await run(home, "sweep", "--once", *ENDS)
        assert (swept.code, swept.document["machines"]) == (0, [])
        assert [one.name for one in foreign if one.destroyed != float("inf")] == []


async def test_restored_database_only_reports_orphans_until_an_operator_acts(services: SharedServices) -> None:
    async with DaemonRig(services) as rig:
        machine, home = await working(rig), rig.daemon.home
        await rig.daemon.leave()
        await rig.restore()
        rig.daemon.start()
        async with Within(300, "the log names what is only reported", rig.daemon.status_message):
            while "only reported: this installation bought it" not in rig.daemon.log():  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        report = await run(home, "doctor", "--orphans")
        assert (report.code, [one["id"] for one in report.document["orphans"]]) == (1, [machine.id])
        assert "a backup" in report.document["orphans"][0]["next"]
        assert machine in services.cloud.alive(rig.installation)
        left = await run(home, "sweep", "--once", *ENDS)
        assert (left.code, [one["destroyed"] for one in left.document["machines"]]) == (1, [False])
        assert machine in services.cloud.alive(rig.installation)
        swept = await run(home, "sweep", "--once", *ENDS, "--spared")
        assert (swept.code, [one["destroyed"] for one in swept.document["machines"]]) == (0, [True])
        assert (await run(home, "doctor", "--orphans")).code == 0


async def test_offline_sweep_acts_only_when_no_broker_lives(services: SharedServices, tmp_path: Path) -> None:
    """The sweep needs only the clouds' keys and the blob store. It runs with another home and without a database."""
    blobs = {"blobs": f"s3://{BUCKET}", "blob_options": KEYS | {ENDPOINT: services.moto}}
    (tmp_path / "gpubroker.yaml").write_text(yaml.safe_dump({"providers": {"local": None}, **blobs}))
    async with DaemonRig(services) as rig:
        mine = f"gb-{rig.installation}-{STRAY}"
        machine, foreign = buy_by_hand(services, mine), buy_by_hand(services, f"{mine}-copy")
        (rig.daemon.home / MARK).touch()  # so that it is not the daemon that ends it
        sweep = ("sweep", "--once", *ENDS, "--installation", rig.installation, "--watch")
        rig.daemon.start()
        await rig.daemon.serves()
        async with Within(300, "the daemon has touched its lease", rig.daemon.status_message):
            lives = await run(tmp_path, *sweep, "60")
            while "a live broker" not in lives.document["judged_by"]:
                lives = await run(tmp_path, *sweep, "60")
        assert (lives.code, [(one["name"], one["orphan"]) for one in lives.document["machines"]]) == (0, [(mine, "")])
        await rig.daemon.leave()
        alone = await run(tmp_path, *sweep, "2")
        assert (alone.code, alone.document["judged_by"]) == (0, "the lease in the blob store")
        assert machine.destroyed < float("inf") == foreign.destroyed

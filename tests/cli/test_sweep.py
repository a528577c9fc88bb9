"""`gpubroker sweep` without a daemon: choice of home and configuration, and the spared machines."""

from pathlib import Path
from typing import Any

import pytest

from broker.controllers.termination import offline_sweep as outside
from broker.controllers.termination.offline_sweep import FoundMachine, Survey
from broker.domain.ids import InstanceName
from broker.domain.instance import InstanceState, Observed
from broker.domain.job import Handle
from broker.runtime import peers as neighbours
from tests.cli.conftest import Ran, invoke

HERE = "abcd"


def sweep(*words: str) -> Ran:
    return invoke("sweep", "--once", "--json", *words)


@pytest.fixture
def theirs(own_home: Path) -> Path:
    """Return a home that is not the default one."""
    home = own_home / "theirs"
    home.mkdir()
    (home / "installation").write_text(f"{HERE}\n")
    (home / "gpubroker.yaml").write_text("providers: {local: null, simulated: {body: virtual}}\n")
    return home


def test_a_named_home_is_the_one_that_is_swept(theirs: Path) -> None:
    ran = sweep("--home", str(theirs))
    assert (ran.code, ran.document["installation"]) == (0, HERE), ran.err


def test_a_configuration_that_names_its_home_is_enough(theirs: Path) -> None:
    elsewhere = theirs.parent / "elsewhere.yaml"
    elsewhere.write_text((theirs / "gpubroker.yaml").read_text() + f"home: {theirs}\n")
    ran = sweep("--config", str(elsewhere))
    assert (ran.code, ran.document["installation"]) == (0, HERE), ran.err


def test_a_sweep_without_home_or_configuration_touches_no_machine(theirs: Path) -> None:
    ran = sweep("--config", str(theirs / "gpubroker.yaml"))
    assert ran.code == 2
    assert "unknown installation; give --installation" in ran.err
    assert str(theirs.parent / "home" / "installation") in ran.err


@pytest.mark.parametrize(
    ("words", "watched_s"),
    [((), 120), (("--destroy",), 120 + 800 + 90), (("--destroy", "--watch", "30"), 30), (("--watch", "30"), 30)],
)
def test_lease_is_watched_until_trainers_have_saved(
    words: tuple[str, ...], watched_s: float, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker whose database is unreachable renews no lease, and its trainers continue meanwhile."""
    watch_times_s: list[float] = []

    async def survey(*_: Any, watch_s: float, **__: Any) -> Survey:
        watch_times_s.append(watch_s)
        return Survey(machines=(), silent={}, judged_by="nobody")

    monkeypatch.setattr(outside, "survey", survey)
    with (theirs / "gpubroker.yaml").open("a") as file:
        file.write("limits: {deadman_s: 800, drain_s: 90}\n")
    ran = sweep("--home", str(theirs), *words)
    assert (ran.code, watch_times_s) == (0, [watched_s]), ran.err


WHY = "only reported: this installation bought it"


def stands(name: str, spared: str = "") -> FoundMachine:
    handle = Handle(provider="simulated", name=InstanceName(name), id=name, region="x")
    return FoundMachine(
        provider="simulated", observed=Observed(handle=handle, state=InstanceState.RUNNING), orphan="no", spared=spared
    )


@pytest.mark.parametrize(
    ("words", "ended", "code"), [((), ["nobodys"], 1), (("--spared",), ["nobodys", "anothers"], 0)]
)
def test_sweep_spares_machines_newer_than_a_restored_database(
    words: tuple[str, ...], ended: list[str], code: int, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A living broker with the newer database may train on it."""
    destroyed: list[str] = []

    async def survey(*_: Any, **__: Any) -> Survey:
        machines = (stands("nobodys"), stands("anothers", WHY))
        return Survey(machines=machines, silent={}, judged_by="the database")

    async def destroy(machine: FoundMachine, *_: Any) -> None:
        destroyed.append(machine.observed.handle.name)

    async def moves(*_: Any) -> bool:
        return True

    monkeypatch.setattr(outside, "survey", survey)
    monkeypatch.setattr(outside, "destroy", destroy)
    monkeypatch.setattr(neighbours, "lease_is_renewed", moves)
    ran = sweep("--home", str(theirs), "--destroy", "--yes", *words)
    assert (ran.code, destroyed) == (code, ended), ran.err
    assert [one["name"] for one in ran.document["machines"] if one["destroyed"]] == ended
    assert [one["spared"] for one in ran.document["machines"]] == ["", WHY]
    assert "a daemon of this installation runs" in ran.err
    assert (f"anothers at simulated is not destroyed: {WHY}" in " ".join(ran.err.split())) is not bool(words)

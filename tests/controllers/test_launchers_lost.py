"""A launcher that is lost with its computer: an operator declares it lost, and the attempt ends."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from broker.cli.main import app
from broker.controllers.provisioning.launcher_completion import StillLives, confirm_lost
from broker.domain.errors import OutcomeUnknown
from broker.domain.ids import JobId
from broker.domain.instance import Liveness
from broker.domain.job import Attempt, AttemptState, JobState
from tests.support.rig.broker_rig import ENDLESS, INSTALLATION, BrokerRig, RigBuilder


@pytest.fixture
def unproven(build_rig: RigBuilder, monkeypatch: pytest.MonkeyPatch) -> BrokerRig:
    """Return a rig whose creates lose their answers and whose launcher's liveness is unknown."""
    rig = build_rig(virtual=ENDLESS)
    create = rig.provider.create

    async def mute(*asked: Any) -> Any:
        await create(*asked)
        raise OutcomeUnknown("the answer was lost")

    monkeypatch.setattr(rig.provider, "launcher", _says(Liveness.UNKNOWN))
    monkeypatch.setattr(rig.provider, "create", mute)
    monkeypatch.setattr("broker.lifecycle.decisions.termination_decision.STUCK_S", 0.1)
    return rig


def _says(liveness: Liveness) -> Callable[..., Any]:
    async def launcher(launched_by: str, name: str) -> Liveness:
        return liveness

    return launcher


async def stuck(rig: BrokerRig) -> tuple[JobId, Attempt]:
    """Return a stopped job and its attempt, which waits only for its launcher."""
    job = await rig.submit()

    async def trains() -> bool:
        return any(attempt.state is AttemptState.TRAINING for attempt in await rig.attempts(job))

    await rig.eventually(trains)
    await rig.stop(job)

    async def reported() -> bool:
        return any("cannot be proven dead" in attempt.detail for attempt in await rig.attempts(job))

    await rig.eventually(reported)
    assert await rig.machines() == []
    (attempt,) = await rig.attempts(job)
    return job, attempt


async def test_an_attempt_ends_once_a_user_confirms_its_launcher_dead(unproven: BrokerRig) -> None:
    async with unproven.running():
        job, attempt = await stuck(unproven)
        assert f"gpubroker launcher lost {attempt.id}" in attempt.detail
        assert await confirm_lost(unproven.store, attempt, unproven.provider)
        await unproven.state_of(job, JobState.CANCELLED)
        assert not await confirm_lost(unproven.store, attempt, unproven.provider), "it has ended"
    (message,) = [event.message for event in await unproven.events(job) if event.kind == "attempt.launcher_lost"]
    assert repr(attempt.launched_by) in message


async def test_a_living_launcher_cannot_be_confirmed_dead(unproven: BrokerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    async with unproven.running():
        job, attempt = await stuck(unproven)
        monkeypatch.setattr(unproven.provider, "launcher", _says(Liveness.ALIVE))
        with pytest.raises(StillLives, match="end its process"):
            await confirm_lost(unproven.store, attempt, unproven.provider)
        (still,) = await unproven.attempts(job)
        assert (still.state, still.launched_by) == (AttemptState.TERMINATING, attempt.launched_by)


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
async def test_the_command_lists_a_lost_launcher_and_confirms_its_death(
    unproven: BrokerRig, postgres_dsn: str, tmp_path: Path
) -> None:
    await unproven.store.installation(INSTALLATION)
    (tmp_path / "installation").write_text(INSTALLATION)
    providers = "providers: {local: null, simulated: {body: virtual}}"
    (tmp_path / "gpubroker.yaml").write_text(f"database_url: {postgres_dsn}\n{providers}\n")

    async def command(*words: str) -> tuple[int, str]:
        asked = ["launcher", *words, "--home", str(tmp_path)]
        done = await asyncio.to_thread(CliRunner().invoke, app, asked, catch_exceptions=False)
        return done.exit_code, " ".join((done.stdout + done.stderr).split())

    async with unproven.running():
        assert (await command("ls"))[1] == "no attempt waits for its launcher"
        job, attempt = await stuck(unproven)
        code, output = await command("ls")
        assert code == 0
        assert attempt.id in output
        code, output = await command("lost", "none", "-y")
        assert (code, "no attempt none waits for its launcher" in output) == (3, True), output
        code, output = await command("lost", attempt.id)
        assert (code, "pass -y" in output) == (2, True), output
        code, output = await command("lost", attempt.id, "-y")
        assert (code, "will not be created" in output) == (0, True), output
        await unproven.state_of(job, JobState.CANCELLED)

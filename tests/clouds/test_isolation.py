"""A machine sees nothing of the host; and the probe that says so can see."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from tests.clouds.bake import NoBake, bake
from tests.clouds.isolation import NotIsolated, found_inside, found_on_host, planted, prove
from tests.clouds.machine import MachineSpec
from tests.clouds.machines import NamespaceMachine, NamespaceMachines, NoNamespaces
from tests.clouds.required import cannot


class Host:
    """Host that runs the probe itself instead of in a machine, with the harmless checks only."""

    async def run(self, *argv: str) -> tuple[int, str]:
        *command, facts = argv
        on_host = json.dumps(json.loads(facts) | {"on_host": True, "walk": "/var/empty"})
        process = await asyncio.create_subprocess_exec(*command, on_host, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        return process.returncode or 0, output.decode()


@pytest.fixture(scope="module")
async def machine() -> AsyncIterator[NamespaceMachine]:
    try:
        machines = await NamespaceMachines.open()
    except (NoNamespaces, NoBake) as e:
        cannot(e)
    try:
        booted = await machines.boot(
            MachineSpec(id="isolated", user="root", public_keys=(), ip="127.77.0.1", ssh_port=40101)
        )
        await booted.ready()
        yield booted
    finally:
        await machines.close()


async def test_the_probe_finds_the_host_where_nothing_hides_it() -> None:
    with planted() as facts:
        found = await asyncio.to_thread(found_on_host, facts)
    assert f"sees {facts['paths'][0]}" in found
    assert len([line for line in found if line.startswith("connects to")]) == 3


async def test_a_machine_finds_nothing(machine: NamespaceMachine) -> None:
    with planted() as facts:
        assert await found_inside(machine, facts) == []
    await prove(machine)


async def test_a_machine_that_is_the_host_is_refused() -> None:
    with pytest.raises(NotIsolated, match="sees /"):
        await prove(Host())


async def test_no_machine_boots_unproven(machine: NamespaceMachine) -> None:
    unproven = NamespaceMachines(bake(), {})
    try:
        with pytest.raises(NotIsolated):
            await unproven.boot(machine.spec)
    finally:
        await unproven.close()


async def test_root_inside_has_no_rights_outside(machine: NamespaceMachine) -> None:
    """Neither files nor processes of root inside belong to the host's root."""
    assert machine.root is not None
    assert (await machine.run("sh", "-c", "echo x > /made-inside; chmod 4755 /made-inside"))[0] == 0
    assert (machine.root / "made-inside").stat().st_uid > 65536


async def test_mounting_and_tracing_stay_inside(machine: NamespaceMachine) -> None:
    code, output = await machine.run("sh", "-c", "mount -t tmpfs none /mnt && echo x > /mnt/f && mount -t sysfs s /sys")
    assert code != 0, "the host's /sys can be mounted inside"
    assert "x" not in output
    code, _ = await machine.run("mount", "-t", "devtmpfs", "none", "/mnt")
    assert code != 0

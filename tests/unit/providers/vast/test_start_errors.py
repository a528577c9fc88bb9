"""Status texts of Vast's hosts: errors after which a container never starts are a fault at once."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.providers.answers import serving
from tests.unit.providers.vast.test_provider import World, machine


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with serving() as api:
        world = World(api, tmp_path)
        yield world
        for cloud in world.clouds:
            await cloud.close()


@pytest.mark.parametrize(
    "status",
    [
        "Error response from daemon: failed to create task for container: failed to create shim task: OCI "
        "runtime create failed: runc create failed: nvidia-container-cli: initialization error: driver rpc "
        "error: timed out",
        "docker: Error response from daemon: could not select device driver nvidia with capabilities: [[gpu]].",
        "failed to register layer: write /usr/lib: no space left on device",
        "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.6, please update your driver",
        "Failed to initialize NVML: Driver/library version mismatch",
    ],
)
async def test_errors_of_the_host_that_keep_the_container_from_starting(world: World, status: str) -> None:
    world.listing(machine(actual_status="created", status_msg=status), machine(id=78, status_msg=status))
    broken, running = await world.cloud().list()
    assert broken.fault is not None
    assert broken.fault.startswith("the host cannot start the container: ")
    assert (broken.image_refused, running.fault) == (False, None)


@pytest.mark.parametrize(
    "status",
    [None, "", "Unable to find image 'acme/x@sha256:ab' locally", "toomanyrequests: unauthenticated pull rate limit"],
)
async def test_errors_that_may_pass_are_no_fault(world: World, status: str | None) -> None:
    world.listing(machine(actual_status="loading", status_msg=status))
    (loading,) = await world.cloud().list()
    assert loading.fault is None

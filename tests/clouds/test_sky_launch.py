"""SkyPilot's calls to each cloud for the daemon: refusals, bids, keys, and interrupted launches.

No machine comes up here; see `test_sky_machines.py`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from broker.domain.errors import NoCapacity, OutcomeUnknown, Rejected
from broker.domain.ids import InstanceName
from broker.domain.instance import Liveness
from providers.skypilot.config import SkyConfig
from providers.skypilot.launcher import SkyLauncher
from tests.clouds import sky_rig
from tests.clouds.emulator import Clouds
from tests.clouds.required import cannot
from tests.clouds.sky_rig import (
    INSTALLATION,
    KEY,
    PLAIN,
    TASK,
    NoRsync,
    certain_liveness,
    launcher,
    name,
    of_community,
    of_lambda,
    of_runpod,
    of_vast,
    processes,
    server,
)
from tests.clouds.wait import GUARD_S, until

L40S, H100 = "NVIDIA L40S", "gpu_1x_h100_pcie"


@pytest.fixture(scope="module")
async def emulated() -> AsyncIterator[Clouds]:
    async with Clouds() as clouds:
        yield clouds
        assert clouds.violations == []


@pytest.fixture(scope="module")
async def sky(emulated: Clouds, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SkyLauncher]:
    state = tmp_path_factory.mktemp("sky")
    try:
        opened = launcher(state, emulated)
    except NoRsync as e:
        cannot(e)
    yield opened
    await opened.stop()
    assert processes(state) == {}


@pytest.fixture
def clouds(emulated: Clouds) -> Iterator[Clouds]:
    """Yield the clouds, and put everything on sale again afterwards."""
    emulated.control.capacity("lambda", H100, 2)
    yield emulated
    emulated.control.heal()
    emulated.control.release_boots()


def created(clouds: Clouds, wanted: InstanceName, launch: asyncio.Task[None]) -> bool:
    return bool(clouds.world.named(wanted)) or launch.done()


async def begun(sky: SkyLauncher, clouds: Clouds, wanted: InstanceName) -> asyncio.Task[None]:
    """Start a launch whose machine is created and does not boot."""
    clouds.control.hold_boots()
    launch = asyncio.create_task(sky.launch(wanted, of_lambda(), PLAIN))
    await until(partial(created, clouds, wanted, launch))
    assert not launch.done(), launch.exception()
    return launch


# ----------------------------------------------------------------------------------------------------------- refusals


async def test_sold_out_is_no_capacity_with_the_clouds_own_words(sky: SkyLauncher, clouds: Clouds) -> None:
    clouds.control.capacity("lambda", H100, 0)
    with pytest.raises(NoCapacity, match=r"^lambda: LambdaCloudError: .*insufficient-capacity"):
        await sky.launch(name("a"), of_lambda(), PLAIN)
    assert clouds.world.named(name("a")) == []
    assert await sky.liveness(sky.id, name("a")) is Liveness.DEAD


async def test_a_refused_key_says_where_to_look(sky: SkyLauncher, clouds: Clouds) -> None:
    clouds.world.api_key = "another"
    try:
        with pytest.raises(Rejected, match=r"^runpod: .*check the key with `gpubroker doctor`") as refused:
            await sky.launch(name("b"), of_runpod(), TASK)
    finally:
        clouds.world.api_key = KEY
    assert KEY not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("old", [False, True])
async def test_a_key_that_was_exchanged_is_the_next_launchs(
    sky: SkyLauncher, clouds: Clouds, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    """The same server launches with the new key. A cloud answers "sold out" only to a key that it accepts."""
    row = clouds.lambdas.types[H100]
    monkeypatch.setattr(row, "free", dict.fromkeys(row.free, 0))
    for pool in clouds.runpod.pools:
        monkeypatch.setattr(pool, "free", 0)
    await sky.warm()
    running = sky.id
    monkeypatch.setattr(clouds.world, "api_key", "the-new-key-of-the-account")
    if not old:
        fresh = clouds.world.api_key.encode()
        exchanged = {
            cloud: {path: content.replace(KEY.encode(), fresh) for path, content in files.items()}
            for cloud, files in sky_rig.KEYS.items()
        }
        monkeypatch.setattr(sky_rig, "KEYS", exchanged)
    for number, bought in enumerate((of_lambda(), of_runpod())):
        with pytest.raises(Rejected if old else NoCapacity):
            await sky.launch(name("yz"[number] if old else "wx"[number]), bought, TASK if number else PLAIN)
    assert sky.id == running


async def test_an_error_of_the_cloud_says_nothing_about_machines(sky: SkyLauncher, clouds: Clouds) -> None:
    clouds.control.fail(cloud="lambda", call="launch", status=500, times=9, done=True)
    with pytest.raises(OutcomeUnknown):
        await sky.launch(name("c"), of_lambda(), PLAIN)


async def test_a_vast_ask_that_is_gone_is_never_another_machine(sky: SkyLauncher, clouds: Clouds) -> None:
    [other, *_] = [o for o in clouds.vast.offers.values() if o.gpu == "RTX 4090" and not o.rented]
    with pytest.raises(NoCapacity, match="vast: HTTPError: 410"):
        await sky.launch(name("d"), of_vast("424242", 0.5), TASK)
    assert not other.rented
    assert clouds.world.named(name("d")) == []


# ------------------------------------------------------------------------------------------------- what is bought, how


async def test_the_second_bid_is_the_second(sky: SkyLauncher, clouds: Clouds) -> None:
    """SkyPilot's workers cache a catalog until they exit, and RunPod's bid comes from the catalog."""
    clouds.control.hold_boots()
    bought = []
    for last, bid in (("e", "0.31"), ("f", "0.37")):
        launch = asyncio.create_task(sky.launch(name(last), of_runpod(bid), TASK))
        await until(partial(created, clouds, name(last), launch))
        [pod] = clouds.world.named(name(last))
        bought.append((str(pod.usd_per_hour), pod.spot, pod.gpu))
        await sky.cancel(name(last))
        with suppress(OutcomeUnknown):
            await launch
    assert bought == [("0.31", True, L40S), ("0.37", True, L40S)]


async def test_a_teams_server_is_asked_by_its_address_and_bids_what_was_quoted(
    sky: SkyLauncher, clouds: Clouds, tmp_path: Path
) -> None:
    await sky.warm()
    document = json.loads((sky._state / "server.json").read_bytes())
    config = SkyConfig(url=f"http://127.0.0.1:{document['port']}", token=document["token"])
    guest = SkyLauncher(config, installation=INSTALLATION, state=tmp_path)
    clouds.control.hold_boots()
    launch = asyncio.create_task(guest.launch(name("m"), of_runpod("0.43"), TASK))
    await until(partial(created, clouds, name("m"), launch))
    [pod] = clouds.world.named(name("m"))
    assert str(pod.usd_per_hour) == "0.43"
    launch.cancel()
    await asyncio.wait([launch])
    assert await guest.liveness(guest.id, name("m")) is Liveness.ALIVE
    await guest.cancel(name("m"))
    await dead(guest, name("m"))
    await guest.close()
    outsider = SkyLauncher(config.model_copy(update={"token": "wrong"}), installation=INSTALLATION, state=tmp_path)
    with pytest.raises(Rejected, match="the token in the configuration is not the server's"):
        await outsider.launch(name("n"), of_runpod(), TASK)
    await outsider.close()


async def test_a_community_pod_is_bought_in_its_country_and_in_no_data_centre(sky: SkyLauncher, clouds: Clouds) -> None:
    clouds.control.hold_boots()
    launch = asyncio.create_task(sky.launch(name("o"), of_community(), TASK))
    await until(partial(created, clouds, name("o"), launch))
    [pod] = clouds.world.named(name("o"))
    assert not pod.facts["pool"].secure
    asked = pod.request
    assert (asked["cloudType"], asked["countryCode"], asked.get("dataCenterId")) == ("COMMUNITY", "US", None)
    await sky.cancel(name("o"))
    with suppress(OutcomeUnknown):
        await launch


async def test_vast_sells_the_very_ask_for_the_bid_and_gets_no_key(sky: SkyLauncher, clouds: Clouds) -> None:
    clouds.control.hold_boots()
    offers = [o for o in clouds.vast.offers.values() if o.gpu == "RTX 4090" and not o.rented and o.min_bid]
    dearest = max(offers, key=lambda offer: offer.min_bid)
    price = round(dearest.min_bid + 0.01, 4)
    launch = asyncio.create_task(sky.launch(name("g"), of_vast(str(dearest.id), price), TASK))
    await until(partial(created, clouds, name("g"), launch))
    [machine] = clouds.world.named(name("g"))
    assert machine.facts["asked_offer"] is dearest
    assert (machine.spot, float(machine.usd_per_hour)) == (True, price)
    assert machine.request["cancel_unavail"] is True
    assert KEY not in json.dumps(dict(machine.request), default=str)
    assert "authorized_keys" in machine.request["onstart"]
    await sky.cancel(name("g"))
    with suppress(OutcomeUnknown):
        await launch


# ------------------------------------------------------------------------------------------------------ cut short


async def test_launch_past_its_deadline_is_cancelled_and_left_to_the_sweep(
    sky: SkyLauncher, clouds: Clouds, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, limit_s, names = sky._config, 12, iter("hqr")
    clouds.control.hold_boots()
    while True:  # a busy machine needs longer until one is created
        late = name(next(names))
        monkeypatch.setattr(sky, "_config", config.model_copy(update={"launch_deadline_s": limit_s}))
        with pytest.raises(OutcomeUnknown, match=f"^lambda: .* was not up after {limit_s} s; the launch was cancelled"):
            await sky.launch(late, of_lambda(), PLAIN)
        await dead(sky, late)
        if made := clouds.world.named(late):
            break
        limit_s *= 3
    assert [machine.gone_at for machine in made] == [None]


async def test_a_launch_continues_without_its_caller_until_it_is_cancelled(sky: SkyLauncher, clouds: Clouds) -> None:
    launch = await begun(sky, clouds, name("i"))
    launch.cancel()
    await asyncio.wait([launch])
    assert launch.cancelled()
    assert await sky.liveness(sky.id, name("i")) is Liveness.ALIVE
    assert await sky.liveness(sky.id, name("j")) is Liveness.DEAD, "another name is another launch"
    await sky.cancel(name("i"))
    await dead(sky, name("i"))


async def test_a_launch_to_whose_machine_no_way_leads_is_cancelled_at_once(sky: SkyLauncher, clouds: Clouds) -> None:
    """Paper machines have no SSH server, for which SkyPilot would wait."""
    mine = name("p")
    launch = asyncio.create_task(sky.launch(mine, of_runpod(), TASK))
    await until(partial(created, clouds, mine, launch))
    await until(lambda: bool(_knocking(sky)))
    assert await sky.liveness(sky.id, mine) is Liveness.ALIVE
    await sky.cancel(mine)
    await dead(sky, mine)
    with suppress(OutcomeUnknown):
        await launch
    assert _knocking(sky) == []


def _knocking(sky: SkyLauncher) -> list[int]:
    """Return processes of the server that try to reach a machine."""
    found = []
    for pid, process in processes(sky._state.parent).items():
        with suppress(psutil.NoSuchProcess):  # each try is a short one
            if process.name() == "ssh":
                found.append(pid)
    return found


async def test_a_killed_server_creates_no_more(sky: SkyLauncher, clouds: Clouds) -> None:
    launch = await begun(sky, clouds, name("k"))
    died, state = sky.id, sky._state.parent
    server(state).kill()
    with pytest.raises(OutcomeUnknown):
        await launch
    await until(lambda: processes(state) == {})
    assert await certain_liveness(sky, died, name("k")) is Liveness.DEAD
    clouds.control.capacity("lambda", H100, 0)
    with pytest.raises(NoCapacity):
        await sky.launch(name("l"), of_lambda(), PLAIN)
    assert sky.id != died
    assert await sky.liveness(died, name("k")) is Liveness.DEAD


async def dead(sky: SkyLauncher, wanted: InstanceName) -> None:
    async with asyncio.timeout(GUARD_S):
        while await sky.liveness(sky.id, wanted) is not Liveness.DEAD:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

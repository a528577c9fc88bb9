"""Combination of a cloud's own API with its launcher: no answer of the one undoes an action of the other."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import ClassVar

import pytest

from broker.domain.errors import NoCapacity, OutcomeUnknown, ProviderError, Rejected, Throttled
from broker.domain.ids import AttemptId, Installation, InstanceName, instance_name
from broker.domain.instance import BootSpec, Caps, InstanceState, Liveness, Observed, TrainerBundle
from broker.domain.job import Handle
from broker.domain.offer import GIB, GpuAsk, Offer
from providers.common.account_guard import Account
from providers.common.cloud import CloudProvider, Purchase
from providers.common.machine_task import MachineTask
from providers.common.market_rules import OfferFilter
from tests.unit.providers.waiting import until

OURS = Installation("aaaa")
NAME = instance_name(OURS, AttemptId("b" * 13))
BOOT = BootSpec(trainer=TrainerBundle(url="https://example.invalid/trainer.tar", sha256="0" * 64))
OFFER = Offer(
    id="paper/paper/x/l4/on-demand", provider="paper", cloud="paper", region="x", instance_type="l4", accelerator="l4",
    gpus=1, gpu_memory_bytes=24 * GIB, vcpus=8, ram_bytes=64 * GIB, disk_bytes=100 * GIB, spot=False,
    usd_per_hour=Decimal("0.5"), seen_at=datetime(2026, 1, 1, tzinfo=UTC),
)  # fmt: skip


def standing(number: str, state: InstanceState = InstanceState.RUNNING) -> Observed:
    return Observed(handle=Handle(provider="paper", id=number, name=NAME), state=state)


@dataclass
class Paper:
    """Cloud and its launcher. `listings`, `looks`: errors of the next answers, before the true ones.

    `heard`: reports about the tasks to the launcher, in this order; the last one repeats.
    """

    listings: list[ProviderError | None] = field(default_factory=list)
    looks: list[ProviderError] = field(default_factory=list)
    machines: list[Observed] = field(default_factory=list)
    forgotten: list[InstanceName] = field(default_factory=list)
    heard: list[bool | str | Exception] = field(default_factory=lambda: [True])
    asked: list[InstanceName] = field(default_factory=list)
    home: ClassVar[Path]
    name: str = "paper"
    id: str = "here"
    caps: Caps = field(default_factory=lambda: Caps(spot=False))
    docker_run: bool = False
    key: str = "first"
    marks: Sequence[str] = ("me",)
    identified: int = 0
    missing: list[str] = field(default_factory=list)

    async def rows(self, offer_filter: OfferFilter) -> None:
        offer_filter.report_unknown_regions(self.name, self.missing)

    async def list(self) -> Sequence[Observed]:
        if self.listings and (error := self.listings.pop(0)) is not None:
            raise error
        return list(self.machines)

    def source(self) -> str:
        return "PAPER_KEY"

    async def destroy(self, handle: Handle) -> None: ...
    async def check(self) -> str | None: ...
    async def credential(self) -> str:
        return self.key

    async def account(self) -> Sequence[str]:
        self.identified += 1
        return self.marks

    def purchase(self, offer: Offer, boot: BootSpec) -> Purchase:
        return Purchase(cloud="paper", region="x", instance_type="l4", use_spot=False)

    async def confirm(self, handle: Handle, purchase: Purchase) -> None:
        if self.looks:
            raise self.looks.pop(0)

    async def close(self) -> None: ...
    async def launch(self, name: InstanceName, purchase: Purchase, task: MachineTask) -> None:
        self.machines.append(standing("1"))

    async def liveness(self, launched_by: str, name: InstanceName) -> Liveness:
        return Liveness.DEAD

    async def started(self, name: InstanceName) -> bool | str:
        self.asked.append(name)
        if name == WITNESS:
            return False
        said = self.heard.pop(0) if len(self.heard) > 1 else self.heard[0]
        if isinstance(said, Exception):
            raise said
        return said

    async def ssh(self, name: InstanceName, *, tty: bool) -> Sequence[str]:
        return ()

    async def cancel(self, name: InstanceName) -> None: ...
    async def forget(self, name: InstanceName) -> None:
        self.forgotten.append(name)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Paper, "home", tmp_path, raising=False)
    monkeypatch.setattr("providers.common.cloud.APPEAR_S", 0.01)
    monkeypatch.setattr("providers.common.start_watch.POLL_S", 0.01)


def opened(paper: Paper) -> CloudProvider:
    return CloudProvider(paper, paper, Account(paper, Paper.home / "account.json"), installation=OURS)


@pytest.mark.parametrize("error", [Throttled("429"), Rejected("the key has expired"), OutcomeUnknown("500")])
async def test_a_listing_that_fails_after_the_launch_gives_no_machine_back(error: ProviderError) -> None:
    paper = Paper(listings=[None, error], caps=Caps(spot=False, list_lag_s=300))
    (handle,) = await opened(paper).create(NAME, OFFER, BOOT)
    assert handle.id == "1"


async def test_a_cloud_that_lists_no_more_after_the_launch_has_refused_nothing() -> None:
    paper = Paper(listings=[None, *[Throttled("429 too many requests")] * 1000])
    with pytest.raises(OutcomeUnknown, match="0 of 1 machines are listed: 429 too many requests"):
        await opened(paper).create(NAME, OFFER, BOOT)


async def test_a_throttled_machine_check_is_repeated() -> None:
    paper = Paper(looks=[Throttled("RequestLimitExceeded", after_s=0.0)])
    assert len(await opened(paper).create(NAME, OFFER, BOOT)) == 1
    paper = Paper(looks=[Throttled("RequestLimitExceeded", after_s=0.0)] * 100)
    with pytest.raises(OutcomeUnknown, match="RequestLimitExceeded"):
        await opened(paper).create(NAME, OFFER, BOOT)


async def test_a_machine_that_fails_its_check_is_refused() -> None:
    paper = Paper(looks=[Rejected("not encrypted")])
    with pytest.raises(Rejected, match="not encrypted"):
        await opened(paper).create(NAME, OFFER, BOOT)


async def test_a_machine_with_a_lost_create_answer_is_polled_normally() -> None:
    paper = Paper(machines=[standing("1")], looks=[Rejected("not encrypted"), Throttled("429")])
    provider = opened(paper)
    for error in (Rejected, Throttled):
        with pytest.raises(error):
            await provider.confirm([paper.machines[0].handle], OFFER, BOOT)
    await provider.confirm([paper.machines[0].handle], OFFER, BOOT)


async def test_missing_configured_region_is_reported_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A configured region that does not exist is reported and logged once."""
    paper = Paper(missing=["us-est-1 (did you mean us-east-1?)"])
    provider = opened(paper)
    assert await provider.check() is None
    for _ in range(2):
        await provider.offers(GpuAsk())
    said = "of providers.paper.regions is not there now: us-est-1 (did you mean us-east-1?)"
    assert (provider.dropped, await provider.check()) == ({said: 1}, f"paper: one {said}")
    assert [record.getMessage() for record in caplog.records] == [f"paper: {said}"]
    paper.missing = []
    await provider.offers(GpuAsk())
    assert await provider.check() is None


async def test_skypilot_purges_no_name_that_another_machine_has() -> None:
    """SkyPilot ends nothing by name while another machine has the same name."""
    paper = Paper(machines=[standing("1"), standing("2")])
    provider = opened(paper)
    await provider.list()
    await provider.destroy(paper.machines[1].handle)
    assert paper.forgotten == []
    paper.machines = [standing("1", InstanceState.GONE), standing("2")]
    await provider.list()
    await provider.destroy(paper.machines[1].handle)
    assert paper.forgotten == [NAME]


# ------------------------------------------------------------------------------------------------------------- faults

WITNESS = instance_name(OURS, AttemptId("c" * 13))
"""A machine whose task is checked for ever: its checks are the clock of these tests."""


def machine(name: InstanceName) -> Observed:
    return replace(standing("2"), handle=Handle(provider="paper", id="2", name=name))


async def looks(paper: Paper, name: InstanceName, more: int = 1) -> None:
    wanted = paper.asked.count(name) + more

    async def seen() -> bool:
        return paper.asked.count(name) >= wanted

    await until(f"{more} looks at {name}", seen)


async def test_a_task_that_failed_marks_its_machine_with_cloud_and_cause() -> None:
    """The mark also applies to a machine that a former daemon launched, and that only the listing names."""
    paper = Paper(machines=[standing("1")], heard=[OutcomeUnknown("no answer"), False, "no image; check it"])
    provider = opened(paper)
    assert [o.fault for o in await provider.list()] == [None]

    async def marked() -> bool:
        return [o.fault for o in await provider.list()] == ["paper: no image; check it"]

    await until("the fault", marked)
    assert len(paper.asked) == 3
    await provider.close()


@pytest.mark.parametrize(("said", "refused"), [("manifest unknown", True), ("docker does not answer", False)])
async def test_a_listed_fault_precedes_the_fault_found_over_ssh(said: str, refused: bool) -> None:
    paper = Paper(machines=[replace(standing("1"), fault=said)], heard=[False])
    provider = opened(paper)
    assert [(o.fault, o.image_refused) for o in await provider.list()] == [(f"paper: {said}", refused)]
    await provider.close()


async def test_a_running_task_is_checked_no_more() -> None:
    paper = Paper(machines=[standing("1"), machine(WITNESS)], heard=[True, "never heard"])
    provider = opened(paper)
    await provider.list()
    await looks(paper, WITNESS, 3)
    assert [o.fault for o in await provider.list()] == [None, None]
    assert paper.asked.count(NAME) == 1
    await provider.close()


@pytest.mark.parametrize("destroyed", [True, False])
async def test_a_machine_that_is_being_destroyed_is_checked_no_more(destroyed: bool) -> None:
    paper = Paper(machines=[standing("1"), machine(WITNESS)], heard=[False])
    others = asyncio.all_tasks()
    provider = opened(paper)
    await provider.list()
    await looks(paper, NAME)
    if destroyed:
        await provider.destroy(paper.machines[0].handle)
    else:
        paper.machines[0] = standing("1", InstanceState.GONE)
    await provider.list()
    before = paper.asked.count(NAME)
    await looks(paper, WITNESS, 3)
    assert paper.asked.count(NAME) == before
    await provider.close()
    assert asyncio.all_tasks() == others


async def test_machines_of_others_are_not_checked() -> None:
    theirs = instance_name(Installation("zzzz"), AttemptId("b" * 13))
    paper = Paper(machines=[machine(theirs), machine(WITNESS)])
    provider = opened(paper)
    await provider.list()
    await looks(paper, WITNESS, 3)
    assert theirs not in paper.asked
    await provider.close()


async def test_a_failed_machine_poll_stops_no_listing(caplog: pytest.LogCaptureFixture) -> None:
    paper = Paper(machines=[standing("1"), machine(WITNESS)], heard=[ValueError("a bug")])
    provider = opened(paper)
    await provider.list()
    await looks(paper, WITNESS, 3)
    assert [o.fault for o in await provider.list()] == [None, None]
    assert [record.exc_info is not None for record in caplog.records] == [True]
    await provider.close()


async def test_identity_names_source_and_account() -> None:
    provider = opened(Paper())
    assert provider.identity == "PAPER_KEY"
    await provider.list()
    assert provider.identity == "PAPER_KEY, account me"


class Refusing(Paper):
    """Cloud that refuses the create, after it has created what `left` has."""

    left: Sequence[Observed] = ()

    def purchase(self, offer: Offer, boot: BootSpec) -> Purchase:
        return replace(super().purchase(offer, boot), refusal_may_leave_machine=True)

    async def launch(self, name: InstanceName, purchase: Purchase, task: MachineTask) -> None:
        self.machines += self.left
        raise NoCapacity("bid_too_low")


@pytest.mark.parametrize(
    ("left", "listings", "kind"),
    [
        ([], [], NoCapacity),
        ([standing("1", InstanceState.STOPPED)], [], OutcomeUnknown),
        ([], [None, OutcomeUnknown("no answer")], OutcomeUnknown),
    ],
)
async def test_errors_of_a_lost_bid_are_final_only_if_no_machine_is_left(
    left: list[Observed], listings: list[ProviderError | None], kind: type[ProviderError]
) -> None:
    paper = Refusing(listings=listings, caps=Caps(spot=True, list_lag_s=0.0))
    paper.left = left
    with pytest.raises(kind) as e:
        await opened(paper).create(NAME, OFFER, BOOT)
    assert e.type is kind
    assert "bid_too_low" in str(e.value)

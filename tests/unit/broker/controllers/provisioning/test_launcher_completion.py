"""A launcher is marked as finished by its own host only, as soon as no part of its call can create a machine."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

from broker.controllers.base.context import ControllerContext
from broker.controllers.provisioning.creates_in_flight import CreatesInFlight
from broker.controllers.provisioning.launcher_completion import LauncherCompletion
from broker.domain.ids import Installation
from broker.domain.instance import Liveness
from broker.domain.job import AttemptState
from broker.ports import Blobs, Change, Lane, Provider
from tests.conformance.samples import HOUR, ManualClock, in_state, running
from tests.support.memory_store.store import MemoryStore


class Cloud:
    """Cloud that knows only the launcher `own`."""

    name = "simulated"

    def __init__(self, own: str) -> None:
        self.own, self.creating, self.cancelled = own, True, 0

    async def launcher(self, launched_by: str, name: str) -> Liveness:
        if launched_by != self.own:
            return Liveness.ALIVE
        return Liveness.ALIVE if self.creating else Liveness.DEAD

    async def cancel(self, name: str) -> None:
        self.cancelled += 1


class Broker:
    def __init__(self, store: MemoryStore, owner: str) -> None:
        self.cloud = Cloud(owner)
        context = ControllerContext(
            installation=Installation("test"), owner=owner, store=store, blobs=cast(Blobs, None), clock=ManualClock(),
            providers={"simulated": cast(Provider, cast(Any, self.cloud))},
        )  # fmt: skip
        self.launchers = CreatesInFlight(context)
        self.through = LauncherCompletion(context, self.launchers)


async def test_only_the_sender_reports_a_launchers_completion_after_its_launch() -> None:
    store = MemoryStore(ManualClock())
    first, second = Broker(store, "first"), Broker(store, "second")
    await running(store, AttemptState.LAUNCHING)
    (leased,) = await store.claim_attempts(Lane.LAUNCH, owner="first", lease_s=HOUR, limit=1)
    ended = replace(in_state(leased.attempt, AttemptState.TERMINATING), launched_by="first")
    first.launchers.register(ended)
    call = asyncio.create_task(asyncio.sleep(HOUR))
    first.launchers.attach(ended.name, call)
    await store.apply([Change(attempt=(leased.attempt, ended))])
    said: Callable[[], Any] = store.unproven_launches

    await second.through.step()
    assert (len(await said()), second.cloud.cancelled) == (1, 0)
    await first.through.step()
    assert call.cancelling()
    assert first.cloud.cancelled == 1
    await asyncio.gather(call, return_exceptions=True)
    await first.through.step()
    assert len(await said()) == 1  # the cloud's side of it continues
    first.cloud.creating = False
    await second.through.step()
    assert len(await said()) == 1
    await first.through.step()
    assert await said() == []


async def test_repeated_create_is_not_over_when_an_earlier_one_was() -> None:
    """The same process repeats the create, under the same launcher. The boot deadline passes meanwhile and must wait
    for it.
    """
    store = MemoryStore(ManualClock())
    broker = Broker(store, "first")
    await running(store, AttemptState.LAUNCHING)
    (leased,) = await store.claim_attempts(Lane.LAUNCH, owner="first", lease_s=HOUR, limit=1)
    sent = replace(leased.attempt, launched_by="first")
    broker.cloud.creating = False
    assert await broker.launchers.dead_since(sent) is not None
    broker.launchers.register(sent)
    broker.cloud.creating = True
    broker.launchers.release(sent.name)  # given up on; the cloud's side of it continues
    assert await broker.launchers.dead_since(sent) is None


async def test_facts_before_another_brokers_create_say_nothing_after_its_answer() -> None:
    """This broker saw that the create was not sent for a while. Then another broker sent it, and it was answered."""
    store = MemoryStore(ManualClock())
    broker = Broker(store, "watches")
    attempt, _ = await running(store, AttemptState.LAUNCHING)
    unsent = replace(attempt, launched_by="")
    clock = cast(ManualClock, broker.launchers._context.clock)
    before = await broker.launchers.dead_since(unsent)
    clock.time += timedelta(seconds=300)
    assert await broker.launchers.dead_since(unsent) == before
    answered = replace(in_state(attempt, AttemptState.TERMINATING), launched_by="")
    assert before is not None
    assert await broker.launchers.dead_since(answered) == before + 300

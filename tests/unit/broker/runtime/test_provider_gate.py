"""A failing cloud is paused and retried in the background, and delays no caller. The event loop's time is virtual."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from broker.controllers.base.context import ControllerContext, Intervals
from broker.controllers.observation.inventory import Inventory
from broker.domain.errors import NoCapacity, OutcomeUnknown, ProviderError, Rejected, Throttled
from broker.domain.ids import Installation, InstanceName
from broker.domain.instance import Caps, Observed
from broker.domain.job import Handle
from broker.domain.offer import GpuAsk, Offer
from broker.runtime.provider_gate import REPEATED_DESTROY_DELAY_S, GateLimits, RateLimitedProvider, full_jitter_s, gated
from tests.clouds.paper import FarBlobs
from tests.clouds.warp import LoopClock
from tests.support.memory_store.store import MemoryStore
from tests.support.rig.virtual_time import run_in_virtual_time

HERE = Installation("abcd")
HANDLE = Handle(provider="paper", id="i-1", name=InstanceName("gb-abcd-aaaaaaaaaaaaa"))


@dataclass
class Paper:
    """A cloud whose answers are written down: each call takes the next one, the last stays."""

    name: str = "paper"
    answers: list[Exception | float | None] = field(default_factory=lambda: [None])
    """An error, seconds that it hangs, or None: it answers."""
    calls: list[float] = field(default_factory=list)
    caps: Caps = field(default_factory=lambda: Caps(spot=False))

    async def list(self) -> Sequence[Observed]:
        self.calls.append(asyncio.get_running_loop().time())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, float):
            await asyncio.sleep(answer)
        elif answer is not None:
            raise answer
        return ()

    async def destroy(self, handle: Handle) -> None:
        await self.list()

    async def confirm(self, *_: Any) -> None:
        await self.list()

    async def offers(self, ask: GpuAsk) -> Sequence[Offer]:
        await self.list()
        return ()

    async def create(self, *_: Any) -> Sequence[Handle]:
        await self.list()
        return (HANDLE,)

    async def close(self) -> None: ...


def gate_of(paper: Any, **limits: Any) -> RateLimitedProvider:
    return RateLimitedProvider(paper, LoopClock(), GateLimits(**limits), back_off_s=lambda failures: 2.0**failures)


async def refused(gate: RateLimitedProvider) -> Throttled:
    with pytest.raises(Throttled) as raised:
        await gate.list()
    return raised.value


def test_a_cloud_is_not_called_before_its_retry_time() -> None:
    async def story() -> None:
        paper = Paper(answers=[Throttled("429", after_s=30.0), None])
        gate, clock = gate_of(paper), LoopClock()
        assert (await refused(gate)).after_s == 30
        while clock.monotonic() < 32:
            assert (await refused(gate)).after_s == pytest.approx(32 - clock.monotonic())
            await clock.sleep(1)
        await gate.list()
        assert paper.calls == [0.0, 32.0]

    run_in_virtual_time(story())


def test_a_cloud_that_refuses_to_launch_is_still_watched_and_ends_bills() -> None:
    async def story() -> None:
        paper = Paper(answers=[Throttled("429", after_s=300.0), None])
        gate = gate_of(paper)
        with pytest.raises(Throttled):
            await gate.create(HANDLE.name, None, None)  # type: ignore[arg-type]
        await gate.list()
        await gate.destroy(HANDLE)
        with pytest.raises(Throttled):
            await gate.offers(GpuAsk())
        assert len(paper.calls) == 3

    run_in_virtual_time(story())


def test_our_own_back_off_never_keeps_a_bill_running_for_long() -> None:
    """However often a destroy, or a listing, was refused: a cloud that asks for no pause is asked again within 15 s."""

    async def story() -> None:
        for call in ("destroy", "list"):
            paper, clock = Paper(answers=[Throttled("429", after_s=0.0)]), LoopClock()
            gate = gate_of(paper)
            while len(paper.calls) < 10:
                with suppress(Throttled):
                    await (gate.destroy(HANDLE) if call == "destroy" else gate.list())
                await clock.sleep(0.5)
            spans = [later - earlier for earlier, later in zip(paper.calls, paper.calls[1:], strict=False)]
            assert max(spans) <= 15.5

    run_in_virtual_time(story())


def test_a_refused_destroy_is_repeated_at_the_clouds_retry_time() -> None:
    async def story() -> None:
        paper, clock = Paper(answers=[Throttled("429", after_s=30.0), None]), LoopClock()
        gate = gate_of(paper)
        for _ in range(2):
            with pytest.raises(Throttled):
                await gate.destroy(HANDLE)
        await gate.list()
        await clock.sleep(33)
        await gate.destroy(HANDLE)
        assert paper.calls == [0.0, 0.0, 33.0]

    run_in_virtual_time(story())


def test_unreachable_cloud_is_retried_in_the_background() -> None:

    async def story() -> None:
        down: list[Exception | float | None] = [OutcomeUnknown("503")] * 6
        paper, clock = Paper(answers=[*down, None]), LoopClock()
        gate = gate_of(paper)
        for _ in range(3):
            with pytest.raises(OutcomeUnknown):
                await gate.list()
        asked = len(paper.calls)
        await refused(gate)
        with pytest.raises(Throttled):
            await gate.create(HANDLE.name, None, None)  # type: ignore[arg-type]
        assert len(paper.calls) == asked
        with pytest.raises(OutcomeUnknown):
            await gate.destroy(HANDLE)  # a destroy ends a bill, so it is still sent
        await clock.sleep(60)
        await gate.list()
        await gate.close()
        assert paper.calls[4:7] == [2.0, 6.0, 14.0]  # 2, 4 and 8 s apart

    run_in_virtual_time(story())


def test_an_answer_that_breaks_our_code_ends_no_trying(caplog: pytest.LogCaptureFixture) -> None:
    """A cloud returns from an outage with a page of its own, which breaks the parser. Without further trials no caller
    would ever ask the cloud again.
    """

    async def story() -> None:
        paper = Paper(answers=[*[OutcomeUnknown("503")] * 3, KeyError("instances"), None])
        gate = gate_of(paper)
        for _ in range(3):
            with pytest.raises(OutcomeUnknown):
                await gate.list()
        await LoopClock().sleep(60)
        assert list(await gate.list()) == []
        await gate.close()

    run_in_virtual_time(story())
    assert "KeyError: 'instances'" in caplog.text


@pytest.mark.parametrize("error", [Rejected("403"), NoCapacity("none left")])
def test_a_refusal_is_an_answer(error: ProviderError) -> None:
    async def story() -> None:
        gate = gate_of(Paper(answers=[error]))
        for _ in range(10):
            with pytest.raises(type(error)):
                await gate.list()

    run_in_virtual_time(story())


def test_a_launcher_that_does_not_answer_says_nothing_of_the_cloud() -> None:
    async def story() -> None:
        gate = gate_of(Paper(answers=[*[OutcomeUnknown("SkyPilot")] * 10, None]))
        for _ in range(10):
            with pytest.raises(OutcomeUnknown):
                await gate.create(HANDLE.name, None, None)  # type: ignore[arg-type]
        assert list(await gate.list()) == []

    run_in_virtual_time(story())


def test_callers_timeout_says_nothing_of_the_cloud_but_a_listings_does() -> None:
    """A caller's timeout is no evidence about the cloud, but the timeout of a listing is."""

    async def story() -> None:
        paper = Paper(answers=[1e9])
        gate = gate_of(paper)

        async def cut(call: Awaitable[object]) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await call

        for _ in range(5):
            await cut(gate.confirm((HANDLE,), None, None))  # type: ignore[arg-type]
            await cut(gate.destroy(HANDLE))
        assert len(paper.calls) == 10
        for _ in range(3):
            await cut(gate.list())
        assert (await refused(gate)).after_s == 5.0
        await gate.close()

    run_in_virtual_time(story())


def test_calls_respect_the_clouds_rate_and_the_queue_is_bounded() -> None:

    async def story() -> None:
        paper = Paper(caps=Caps(spot=False, calls_per_s=1.0))
        gate = gate_of(paper, waiting=10)
        answers = await asyncio.gather(*(gate.list() for _ in range(40)), return_exceptions=True)
        assert sum(isinstance(answer, Throttled) for answer in answers) == 40 - 4 - 10  # at once, and in the queue
        spans = [later - earlier for earlier, later in zip(paper.calls[4:], paper.calls[5:], strict=False)]
        assert len(paper.calls) == 14
        assert min(spans) >= 1 - 1e-6

    run_in_virtual_time(story())


def test_first_destroys_precede_repeats_and_listings_wait_for_neither() -> None:
    """Callers ask for 20 machines and prices at a cloud that accepts one call per second. Each caller gives up after 10
    s.
    """

    async def story() -> None:
        paper, clock = Paper(caps=Caps(spot=False, calls_per_s=1.0)), LoopClock()
        gate, asked = gate_of(paper), Counter[str]()

        async def again_and_again(what: str, call: Callable[[], Awaitable[object]]) -> None:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(10):
                        await call()
                        asked[what] += 1
                await clock.sleep(1)

        machines = [replace(HANDLE, id=f"i-{n}") for n in range(20)]
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            machine.id: partial(gate.destroy, machine) for machine in machines
        }
        calls["prices"] = partial(gate.offers, GpuAsk())
        asking = [asyncio.create_task(again_and_again(what, call)) for what, call in calls.items()]
        while clock.monotonic() < 60:
            begun = clock.monotonic()
            await gate.list()
            assert clock.monotonic() - begun <= 1 + 1e-6
            await clock.sleep(2)
        assert asked.keys() == calls.keys()
        for task in asking:
            task.cancel()

    run_in_virtual_time(story())


def test_first_destroys_precede_repeats_after_a_refusal() -> None:
    """First destroys precede repeats even if they are asked for later. Repeats proceed if no first destroy waits."""

    async def story() -> None:
        paper, clock = Paper(answers=[None, Throttled("429", after_s=10.0), None]), LoopClock()
        gate, other = gate_of(paper), replace(HANDLE, id="i-2")
        await gate.destroy(HANDLE)
        with pytest.raises(Throttled):
            await gate.destroy(HANDLE)
        await clock.sleep(13)  # the cloud's pause and our own back-off
        with pytest.raises(Throttled):
            await gate.destroy(HANDLE)
        await gate.destroy(other)
        await gate.destroy(HANDLE)
        paper.answers = [Throttled("429", after_s=10.0), None]
        with pytest.raises(Throttled):
            await gate.destroy(other)
        await clock.sleep(12 + REPEATED_DESTROY_DELAY_S)
        await gate.destroy(HANDLE)

    run_in_virtual_time(story())


def test_one_bad_cloud_slows_no_other() -> None:
    """The bad cloud hangs for an hour of rounds. The rounds of its first three calls wait for it, no other round
    does.
    """

    async def story() -> None:
        clock, bad, good = LoopClock(), Paper("bad", answers=[1e9]), Paper("good")
        providers = gated({"bad": bad, "good": good}, {"bad", "good"}, clock)  # type: ignore[dict-item]
        context = ControllerContext(
            installation=HERE, owner="one", store=MemoryStore(clock), blobs=FarBlobs.in_memory(HERE),
            providers=providers, clock=clock, intervals=Intervals(),
        )  # fmt: skip
        inventory, slow, rounds = Inventory(context), 0, 0
        while clock.monotonic() < 3600:
            begun = clock.monotonic()
            assert await inventory.refresh_all(["bad", "good"]) == {"bad"}
            slow += clock.monotonic() - begun > 1
            rounds += 1
            await clock.sleep(2)
        assert slow == 3
        assert len(good.calls) == rounds
        assert len(bad.calls) < 300
        for provider in providers.values():
            await provider.close()

    run_in_virtual_time(story())


def test_back_off_has_full_jitter() -> None:
    drawn = [full_jitter_s(4) for _ in range(200)]
    assert 0 <= min(drawn) < 2
    assert 6 < max(drawn) <= 8
    assert max(full_jitter_s(40) for _ in range(50)) <= 60
